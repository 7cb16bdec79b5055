"""The OpenAI-compatible HTTP interface: JSON and SSE on one side, `backend.Backend` on the other. Knows nothing of Ray.

A request passes: app → body (strict JSON) → requests (pydantic) → generation (tokenised, tier chosen) →
choices (one stream per choice) → responses + sse. Whatever goes wrong becomes an OpenAI error object in errors.
"""
