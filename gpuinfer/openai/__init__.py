"""The words of OpenAI's API: what a request or a row may say, the prompt that it is, and the response to it.

schema      the fields, and which values they take
sampling    what a request says of its answer → `Sampling`, `Rendering`
requests    the body of a request → `Prompt`, or what is wrong with it
splitting   a stream of bytes → rows of JSONL or of a JSON array
rows        a row → `Prompt`; a file of prompts
responses   `Generation` → a response; `Part`s → its chunks; an error → OpenAI's shape
options     the same words as flags of commands
"""
