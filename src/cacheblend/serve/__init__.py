"""The server: OpenAI's API over the embedded engine, a chunk API, metrics, and a page to try it on.

app          puts the parts together: `create_app`
routes/      what is served: openai, chunks, health, playground
state        what routes share; settings, keys, tenants, metrics
tools/       tool calls of requests and of answers
schemas, prompts, running, responses
             a request on its way: parsed, made a prompt, run, answered
middleware, errors, memory
             limits and the request log; errors in OpenAI's form; the process's memory
"""
