"""The names of a turn's span, in one table: OpenTelemetry's for generative AI are still being changed.

None of them is for text: no message, no system prompt and no reply is ever in a trace.
"""

from __future__ import annotations

from typing import Final

OPERATION: Final = "chat"  # also how the span's name begins
SYSTEM: Final = "pensieve"
# OpenTelemetry's
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
TOP_K: Final = "gen_ai.request.top_k"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_ID: Final = "gen_ai.response.id"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
ERROR_TYPE: Final = "error.type"
# ours
RECOMPUTED_TOKENS: Final = "pensieve.usage.recomputed_tokens"
TENANT: Final = "pensieve.tenant"
# events
ADMITTED: Final = "pensieve.admitted"  # the engine has a place for it: the end of its queueing
FIRST_TOKEN: Final = "pensieve.first_token"
