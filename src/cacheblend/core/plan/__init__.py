"""What a prompt asks for and what a store holds: prompts of text and chunks, blocks and their compression, chunks found
by content, and the plan that says where each row's KV comes from."""
