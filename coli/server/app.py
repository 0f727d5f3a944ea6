"""The application: which path is whose, and the small endpoints that say what the server is and does.

    /v1/chat/completions, /v1/completions, /v1/responses    OpenAI's
    /v1/messages, /v1/messages/count_tokens                 Anthropic's
    /v1/models, /v1/models/{id}                             both read it
    /health, /version                                       for probes: no key, no model needed
    /metrics, /profile                                      for operators

The application is there before the model is: `app.state.service` is None until then (guards.Ready).
Guarded by tests/server/test_app.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coli.server import anthropic, openai_chat, openai_completions, openai_responses
from coli.server.errors import ApiError, body, model_not_found
from coli.server.guards import Answered, Body, Cors, Door, Named, Ready
from coli.server.options import ServeOptions
from coli.server.service import Service

ROUTES = {
    "/v1/chat/completions": openai_chat.endpoint,
    "/v1/completions": openai_completions.endpoint,
    "/v1/responses": openai_responses.endpoint,
    "/v1/messages": anthropic.endpoint,
    "/v1/messages/count_tokens": anthropic.count_tokens,
}


def make_app(options: ServeOptions, service: Service | None = None, say: Callable[[str], None] = lambda _: None
             ) -> Starlette:  # fmt: skip
    """The application; without a service it says `loading` until `app.state.service` is one. `say` is told of faults
    that no client is told of."""
    posts = [Route(path, endpoint, methods=["POST"], middleware=[Middleware(Body)])
             for path, endpoint in ROUTES.items()]  # fmt: skip
    gets = [Route(path, endpoint, methods=["GET"]) for path, endpoint in _SMALL.items()]
    cors = Middleware(
        Cors, allow_origins=options.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip
    layers = [Middleware(Named), *([cors] if options.cors_origins else []), Middleware(Answered, say=say),
              Middleware(Door, options=options), Middleware(Ready)]  # fmt: skip
    app = Starlette(routes=[*posts, *gets], middleware=layers, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _health(request: Request) -> Response:
    service: Service | None = request.app.state.service
    if service is None:
        return JSONResponse({"status": "loading"}, 503, {"retry-after": "1"})
    facts = {"status": "draining" if service.draining else "ok", "running": service.scheduler.running,
             "waiting": service.scheduler.waiting, "slots": service.options.slots,
             "drafts": service.drafts}  # fmt: skip
    return JSONResponse(facts, 503 if service.draining else 200)


async def _version(request: Request) -> Response:
    return JSONResponse({"name": "coli", "version": version("coli")})


async def _models(request: Request) -> Response:
    models = _service(request).models()
    ends = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}  # Anthropic's pages
    return JSONResponse({"object": "list", "data": models, **ends})


async def _model(request: Request) -> Response:
    service, name = _service(request), request.path_params["name"]
    for model in service.models():
        if model["id"] == name:
            return JSONResponse(model)
    raise model_not_found(name, service.model_id)


async def _metrics(request: Request) -> Response:
    content, kind = _service(request).metrics.render(request.headers.get("accept", ""))
    return Response(content, media_type=kind)


async def _profile(request: Request) -> Response:
    return JSONResponse(_service(request).profile.to_json())


def _service(request: Request) -> Service:
    return request.app.state.service


async def _http_error(request: Request, error: Any) -> Response:
    """Starlette's own refusals: an unknown path, a wrong method."""
    refusal = ApiError.of(error)
    if refusal.status == 404:
        refusal = ApiError(404, f"nothing is at {request.url.path}", code="unknown_path")
    elif refusal.status == 405:
        allowed = refusal.headers.get("Allow", "")
        what = f"{request.method} is not possible at {request.url.path}" + (f", {allowed} is" if allowed else "")
        refusal = ApiError(405, what, code="method_not_allowed", headers=refusal.headers)
    return JSONResponse(body(refusal, request.scope), refusal.status, refusal.headers)


_SMALL = {
    "/v1/models": _models,
    "/v1/models/{name:path}": _model,
    "/health": _health,
    "/version": _version,
    "/metrics": _metrics,
    "/profile": _profile,
}
