"""Shapes of a target and of its drafter, read from `config.json` and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridspec.errors import ModelError

TARGET_ARCHITECTURES = (
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
DRAFTER_ARCHITECTURES = ("DFlashDraftModel",)


@dataclass(frozen=True)
class TargetConfig:
    """Text part of a hybrid GDN + MoE target.

    Attributes name Hugging Face's fields; `layer_is_attention` has one flag a layer and
    `weight_prefix` is where the checkpoint keeps the text model.
    """

    architecture: str
    weight_prefix: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_is_attention: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    conv_kernel: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    normalise_top_k: bool
    rms_norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_multiple("attention heads", self.num_heads, self.num_kv_heads)
        _require_multiple("linear value heads", self.gdn_value_heads, self.gdn_key_heads)
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ModelError(
                f"config.json rotates {self.rotary_dim} of {self.head_dim} dimensions a head; an "
                "even number of them is needed: check partial_rotary_factor"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k and v of one GDN layer."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, full in enumerate(self.layer_is_attention) if not full)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(i for i, full in enumerate(self.layer_is_attention) if full)


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash block drafter; embeddings and LM head are the target's."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self) -> None:
        _require_multiple("drafter heads", self.num_heads, self.num_kv_heads)
        if self.head_dim % 2:
            raise ModelError(f"drafter config.json has head_dim = {self.head_dim}; it must be even")


def _require_multiple(name: str, heads: int, groups: int) -> None:
    if heads % groups:
        raise ModelError(
            f"config.json has {heads} {name} in {groups} groups; they must divide evenly: "
            "use the config.json that belongs to the weights"
        )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a model folder, refusing what is no such file."""
    path = folder / name
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; a Hugging Face model folder is needed: check the path"
        )
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {name}, so it is no Hugging Face model folder: "
            "point to the folder that holds config.json and *.safetensors"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object: download again")
    return content


class _Fields:
    """Typed look-ups in one config object, with the file named in every refusal."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def _number(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        value = self.values.get(name, default)
        if value is None:
            raise ModelError(f"{self.path} lacks {name}; the model cannot be built without it")
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise ModelError(f"{self.path} has {name} = {value!r}; a number > 0 is needed")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._number(name, default, (int,)))

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._number(name, default, (int, float)))

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.path} has {name} = {value!r}; an object is needed")
        return value


@contextmanager
def _wrong_kinds_refused(path: Path) -> Iterator[Path]:
    """Turn a list where a number belongs, and the like, into a refusal that names the file."""
    try:
        yield path
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} has a value of the wrong kind ({error}): download it again"
        ) from error


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _architecture(config: Mapping[str, Any], path: Path, known: tuple[str, ...]) -> str:
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if name in known:
            return str(name)
    raise ModelError(
        f"{path} has architectures = {names}; supported here: {', '.join(known)}: "
        "use a checkpoint of one of these"
    )


def load_target_config(folder: Path) -> TargetConfig:
    """Read and check the target's `config.json`.

    Raises:
        ModelError: not a folder, no such file, another architecture, or a field that is missing
            or cannot be right.
    """
    config = read_json(folder, "config.json")
    with _wrong_kinds_refused(folder / "config.json") as path:
        return _target_config(folder, config, path)


def _target_config(folder: Path, config: Mapping[str, Any], path: Path) -> TargetConfig:
    architecture = _architecture(config, path, TARGET_ARCHITECTURES)
    nested = "text_config" in config
    text = _Fields(config["text_config"] if nested else config, path)
    rope = text.mapping("rope_parameters") or text.mapping("rope_scaling")
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"{path} has rope_type = {rope['rope_type']!r}; only 'default' is supported here"
        )
    activation = text.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{path} has hidden_act = {activation!r}; only 'silu' is supported here")
    if text.values.get("attention_bias"):
        raise ModelError(f"{path} has attention_bias = true; only false is supported here")
    num_layers = text.integer("num_hidden_layers")
    interval = text.integer("full_attention_interval", 4)
    kinds = text.values.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "linear_attention"}:
        raise ModelError(
            f"{path} has {len(kinds)} layer_types of {sorted(set(kinds))} for {num_layers} layers; "
            "one 'linear_attention' or 'full_attention' a layer is needed"
        )
    if kinds[0] != "linear_attention":
        raise ModelError(
            f"{path} starts with a {kinds[0]} layer; the first-router stop needs a Gated DeltaNet "
            "layer first"
        )
    if text.values.get("mlp_only_layers") or text.integer("decoder_sparse_step", 1) != 1:
        raise ModelError(f"{path} has layers without routed experts; all layers must have them")
    head_dim = text.integer("head_dim", 256)
    # transformers takes a quarter where neither place says anything.
    partial = float(
        rope.get("partial_rotary_factor", text.values.get("partial_rotary_factor") or 0.25)
    )
    theta = rope.get("rope_theta", text.values.get("rope_theta"))
    if theta is None:
        raise ModelError(f"{path} lacks rope_theta; positions cannot be encoded without it")
    top_k, experts = text.integer("num_experts_per_tok"), text.integer("num_experts")
    if top_k > experts:
        raise ModelError(f"{path} has top-{top_k} of {experts} experts; top-k must be <= experts")
    generation = {}
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder, "generation_config.json")
    eos = _token_ids(
        generation.get("eos_token_id", text.values.get("eos_token_id", config.get("eos_token_id")))
    )
    tied = bool(config.get("tie_word_embeddings", text.values.get("tie_word_embeddings", False)))
    multimodal = architecture == "Qwen3_5MoeForConditionalGeneration"
    return TargetConfig(
        architecture=architecture,
        weight_prefix="model.language_model." if multimodal else "model.",
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        layer_is_attention=tuple(kind == "full_attention" for kind in kinds),
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial),
        rope_theta=float(theta),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4),
        gdn_key_heads=text.integer("linear_num_key_heads"),
        gdn_value_heads=text.integer("linear_num_value_heads"),
        gdn_key_dim=text.integer("linear_key_head_dim"),
        gdn_value_dim=text.integer("linear_value_head_dim"),
        num_experts=experts,
        experts_per_token=top_k,
        expert_width=text.integer("moe_intermediate_size"),
        shared_width=text.integer("shared_expert_intermediate_size"),
        # Qwen3.5 always renormalises; only Qwen3-Next has the field.
        normalise_top_k=bool(text.values.get("norm_topk_prob", True)) or "Qwen3_5" in architecture,
        rms_norm_eps=text.real("rms_norm_eps", 1e-6),
        tied_embeddings=tied,
        max_position_embeddings=text.integer("max_position_embeddings"),
        eos_token_ids=eos,
    )


def load_drafter_config(folder: Path) -> DrafterConfig:
    """Read and check a DFlash drafter's `config.json`.

    Raises:
        ModelError: as `load_target_config`.
    """
    config = read_json(folder, "config.json")
    with _wrong_kinds_refused(folder / "config.json") as path:
        return _drafter_config(config, path)


def _drafter_config(config: Mapping[str, Any], path: Path) -> DrafterConfig:
    _architecture(config, path, DRAFTER_ARCHITECTURES)
    top = _Fields(config, path)
    flash = _Fields(top.mapping("dflash_config"), path)
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(f"{path} has drafter layers {sorted(kinds)}; only full_attention works")
    layer_ids = flash.values.get("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids:
        raise ModelError(
            f"{path} has dflash_config.target_layer_ids = {layer_ids!r}; a list needed"
        )
    mask = flash.values.get("mask_token_id")
    if not isinstance(mask, int):
        raise ModelError(f"{path} has dflash_config.mask_token_id = {mask!r}; a token id is needed")
    rope = top.mapping("rope_parameters")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ModelError(f"{path} lacks rope_theta; positions cannot be encoded without it")
    heads = top.integer("num_attention_heads")
    return DrafterConfig(
        hidden_size=top.integer("hidden_size"),
        vocab_size=top.integer("vocab_size"),
        num_layers=top.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=top.integer("num_key_value_heads"),
        head_dim=top.integer("head_dim", top.integer("hidden_size") // heads),
        mlp_width=top.integer("intermediate_size"),
        rope_theta=float(theta),
        rms_norm_eps=top.real("rms_norm_eps", 1e-6),
        block_size=flash.integer("block_size", top.integer("block_size", 16)),
        mask_token_id=mask,
        target_layer_ids=tuple(int(i) for i in layer_ids),
        num_target_layers=flash.integer("num_target_layers", config.get("num_target_layers")),
    )


def check_pair(target: TargetConfig, drafter: DrafterConfig, drafter_folder: Path) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ModelError: names the first field that does not fit.
    """
    wants = (
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
    )
    for name, have, need in wants:
        if have != need:
            raise ModelError(
                f"drafter {drafter_folder} was made for another target: its {name} is {have}, this "
                f"target has {need}: use the drafter trained for this target"
            )
    if drafter.block_size != 16:
        raise ModelError(
            f"drafter {drafter_folder} has block_size {drafter.block_size}; only 16 is supported"
        )
    if list(drafter.target_layer_ids) != sorted(set(drafter.target_layer_ids)):
        raise ModelError(
            f"drafter {drafter_folder} reads target layers {list(drafter.target_layer_ids)}; only "
            "rising layer ids are supported"
        )
    bad = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_layers]
    if bad:
        raise ModelError(
            f"drafter {drafter_folder} reads hidden states of target layers {bad}; this target "
            f"has layers 0..{target.num_layers - 1}: use the drafter trained for this target"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise ModelError(
            f"drafter {drafter_folder} has mask token {drafter.mask_token_id}; it must lie in "
            f"0..{target.vocab_size - 1}"
        )
