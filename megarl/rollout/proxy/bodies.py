"""Bodies of requests, within limits of time and size.

aiohttp 3.14 answers a Content-Encoding that it cannot read with a page of its own, before any
handler. So it is told to leave bodies as they are, and they are decoded here.
"""

import asyncio
import json
import zlib

from aiohttp import web

from megarl.rollout.proxy.errors import ProxyError
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.session import Limits


async def read_body(request: web.Request, limits: Limits, *, is_optional: bool) -> Fields:
    """The JSON object of a request; an empty one for no body, if that is optional.

    Raises:
      ProxyError: 400, it is no such thing; 408, it did not come; 413, it is too large; 415, it is
        encoded as neither gzip nor deflate.
      aiohttp.web.HTTPRequestEntityTooLarge: as it was sent.
    """
    try:
        async with asyncio.timeout(limits.client_timeout_s):
            raw = await request.read()
    except TimeoutError:
        raise ProxyError(408, f"the body did not come within {limits.client_timeout_s} s") from None
    except web.RequestPayloadError:
        raise ProxyError(400, "body: it is not what its headers say") from None
    if not raw and is_optional:
        return Fields({})
    raw = _decoded(raw, request.headers.get("Content-Encoding", ""), limits.max_body_bytes)
    try:
        return Fields(json.loads(raw))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, too deep, or a huge int
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProxyError(400, f"body: not valid JSON: {why}") from None


def _decoded(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return raw
    if encoding not in ("gzip", "deflate"):
        raise ProxyError(415, f"Content-Encoding: only gzip and deflate, got {encoding[:40]!r}")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip's header or zlib's
    try:
        body = decoder.decompress(raw, max_bytes + 1)
    except zlib.error:
        raise ProxyError(400, "body: it is not what its Content-Encoding says") from None
    if len(body) > max_bytes:
        raise ProxyError(413, f"the body is above {max_bytes} bytes", code="request_too_large")
    if not decoder.eof:
        raise ProxyError(400, "body: it is not what its Content-Encoding says")
    return body
