"""The server: OpenAI's API over the embedded engine, a chunk API, metrics, and a page to try it on.

app          puts the parts together: `create_app`; routes/: openai, responses, chunks, playground
state        what routes share; settings, keys, tenants, metrics
fields, schemas, prompts, admission
             a request on its way: its fields, parsed, made a prompt, run; tool_calls of its answer
middleware, fair_queue, connections, errors, log_lines, memory
             limits, turns and the request log; errors in OpenAI's form; the process's memory
"""
