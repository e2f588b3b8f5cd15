"""Arrow schemas of the rows behind a certificate; the rules of `schemas.py` hold."""

from __future__ import annotations

import pyarrow as pa

from hybridspec.artifacts.schemas import SCHEMA_ID_KEY


def _field(name: str, kind: pa.DataType, unit: str = "") -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"unit": unit} if unit else None)


def _schema(name: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(
        list(fields), metadata={SCHEMA_ID_KEY: f"hybridspec.certificate.{name}/1".encode()}
    )


FIGURES_SCHEMA = _schema(
    "figures",
    _field("gate", pa.string()),
    _field("figure", pa.string(), "unit in its name"),
    _field("value", pa.float64()),
)
TEXTS_SCHEMA = _schema(
    "texts",
    _field("arm", pa.string(), "plain, plain-again, hybridspec, or one of them with -questions"),
    _field("prompt_id", pa.string()),
    _field("category", pa.string()),
    _field("text", pa.string(), "generated"),
    _field(
        "token_ids",
        pa.list_(pa.field("element", pa.int32(), nullable=False)),
        "generated token ids, empty where a server does not tell them",
    ),
    _field("num_tokens", pa.int32(), "generated tokens"),
    _field("loop_at", pa.int32(), "piece where a repetition loop begins, -1 without one"),
    _field("decode_us", pa.float64(), "us"),
)
DIFFERENCES_SCHEMA = _schema(
    "differences",
    _field("comparison", pa.string(), "control or greedy"),
    _field("prompt_id", pa.string()),
    _field("position", pa.int32(), "generated tokens before the first difference"),
    _field("plain", pa.string(), "what plain decoding says there"),
    _field("other", pa.string(), "what the other text says there"),
    _field("gap_logits", pa.float64(), "logits below the best of plain decoding; -1 unknown"),
    _field("allowed_logits", pa.float64(), "largest gap that counts as a tie"),
    _field("kind", pa.string(), "tie or fault"),
)
ANSWERS_SCHEMA = _schema(
    "answers",
    _field("prompt_id", pa.string()),
    _field("expected", pa.string()),
    _field("plain", pa.string(), "answer of plain decoding, empty without one"),
    _field("hybridspec", pa.string(), "answer with drafts, empty without one"),
    _field("plain_correct", pa.int32(), "0 or 1"),
    _field("hybridspec_correct", pa.int32(), "0 or 1"),
)
