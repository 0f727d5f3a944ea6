"""`coli serve`: OpenAI's and Anthropic's HTTP APIs over one engine.

    options      what a server is started with
    serving      socket, uvicorn, signals, drain
    reader       HTTP off the socket
    app, guards  routes, and what every request passes first: key, host, size, id
    errors       one error in both APIs' shapes
    service      what the endpoints share: engine, scheduler, metrics
    scheduler    queue, slots and the one engine thread
    ask          a request of either API becomes the session's
    one_call     an answer that calls one tool at most
    answering    a session's steps become reasoning, content, tool calls and usage
    openai_*, anthropic, responses   the wire formats
    metrics, profile, turn_lines     what is counted, kept and said

Starlette, uvicorn, pydantic and prometheus-client are the extra `serve`; nothing outside this package imports them.
"""
