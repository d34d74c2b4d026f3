"""One replica: a model behind HTTP, in OpenAI's words (`openai`) and in our own, with metrics and a live page
(`monitoring`).
"""
