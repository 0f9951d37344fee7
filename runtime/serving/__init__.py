"""HTTP: an OpenAI-compatible face of one engine, and its metrics. The only place that imports FastAPI and its friends.

Nothing here is loaded by ``import runtime``; the packages it needs come with the extra ``serve``.
"""
