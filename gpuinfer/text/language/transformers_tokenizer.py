"""The language of a model of any family, by the tokenizer that transformers has for it: one that vLLM has opened, or
that of a folder which our own decoders do not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module, util
from typing import Any

from tokenizers import Tokenizer

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.language.chat_template import ChatTemplates
from gpuinfer.text.language.detokenizer import Codec
from gpuinfer.text.language.language import Language, open_language
from gpuinfer.text.language.tokenizer import DEFAULT, NAMED_TOKENS, WITH_TOOLS, Subwords, TokenizerSettings
from gpuinfer.text.text_options import path_kind


def transformers_codec(tokenizer: Any) -> Codec:
    """A tokenizer of transformers, as ours are asked. It is copied, as it may belong to other threads.

    Raises `UsageError` for one that is not of the `tokenizers` library.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(inner, Tokenizer):
        raise UsageError(
            f"the model's tokenizer is a program of its own ({type(tokenizer).__name__}), and none of the tokenizers "
            "library: how its tokens are spelt is not known here. Save it as one, tokenizer.json, if it can be: "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return Subwords(Tokenizer.from_str(inner.to_str()))


def language_of(
    tokenizer: Any, vocabulary: int, end_tokens: Sequence[int], beginning: int | None, templates: Mapping[str, str]
) -> Language:
    """`vocabulary`, `end_tokens` and `beginning` are the model's own; the tokenizer's end token ends an answer too.
    `templates`: of chats, by `DEFAULT` and `WITH_TOOLS`. Raises `UsageError` as `transformers_codec` does.
    """
    known = getattr(tokenizer, "special_tokens_map", {})
    named = {name: str(known[name]) for name in NAMED_TOKENS if isinstance(known.get(name), str)}
    own = (*end_tokens, getattr(tokenizer, "eos_token_id", None))
    ends = tuple(dict.fromkeys(token for token in own if isinstance(token, int) and 0 <= token < vocabulary))
    first = next((one for one in (beginning, getattr(tokenizer, "bos_token_id", None)) if isinstance(one, int)), None)
    chats = None
    if DEFAULT in templates:
        settings = TokenizerSettings(
            named=named, template=templates[DEFAULT], tool_template=templates.get(WITH_TOOLS, templates[DEFAULT])
        )
        chats = ChatTemplates(settings)
    return Language(transformers_codec(tokenizer), vocabulary, ends, first, chats)


def token_ids_of(given: Any) -> tuple[int, ...]:
    """The tokens of a key such as eos_token_id: one, several or none."""
    several = given if isinstance(given, list | tuple) else [given]
    return tuple(one for one in several if isinstance(one, int) and not isinstance(one, bool))


def open_model_language(spec: ModelSpec) -> Language:
    """The language of a model that another process may compute: prompts are written and answers read with it here.

    Of a family that our decoders do not read it is what transformers, where it is installed, finds in the folder, or in
    its cache under the model's name. Raises `UsageError`, which says why our own reader refuses the model.
    """
    try:
        checkpoint = open_checkpoint(spec)
    except UsageError:
        if spec.weights is not None or util.find_spec("transformers") is None:
            raise
        try:
            return _language_by_transformers(spec)
        except (OSError, ValueError, KeyError, ImportError):  # it finds none, or needs code of the model's own
            pass
        raise
    return open_language(checkpoint.language, checkpoint.shape)


def _language_by_transformers(spec: ModelSpec) -> Language:
    library, here = import_module("transformers"), {"local_files_only": True}
    path, kind = path_kind(spec.name)
    name = spec.name if kind == "nothing" else str(path)
    config, _ = library.PretrainedConfig.get_config_dict(name, **here)
    config = config.get("text_config") or config
    tokenizer = library.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **here)
    try:
        ends = token_ids_of(library.GenerationConfig.from_pretrained(name, **here).eos_token_id)
    except OSError:
        ends = ()
    ends = ends or token_ids_of(config.get("eos_token_id"))
    beginning = next(iter(token_ids_of(config.get("bos_token_id"))), None)
    found = tokenizer.chat_template
    templates = found if isinstance(found, dict) else {} if found is None else {DEFAULT: found}
    return language_of(tokenizer, int(config.get("vocab_size") or len(tokenizer)), ends, beginning, templates)
