"""Language: from prompts to tokens, from tokens to text, and the grammars that answers are kept to."""

from gpuinfer.text.language.detokenizer import IncrementalDetokenizer
from gpuinfer.text.language.grammar import GrammarMatcher
from gpuinfer.text.language.language import Language, has_chat_template, open_language
from gpuinfer.text.language.recommended import recommended_sampling

__all__ = [
    "GrammarMatcher",
    "IncrementalDetokenizer",
    "Language",
    "has_chat_template",
    "open_language",
    "recommended_sampling",
]
