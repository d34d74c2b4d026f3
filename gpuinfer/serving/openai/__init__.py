"""The words of OpenAI's API: what a request or a row may say (`schema`), the prompt that it is (`requests`,
`prompt_rows`), the response to it (`responses`), and the same words as flags of commands (`model_options`).
"""
