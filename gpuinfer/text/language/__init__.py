"""Language: from prompts to tokens, from tokens to text as it grows, and what an answer must match.

```
opening.py     which of them a checkpoint has
language.py    all of it behind one face
chat.py  sandbox.py                   chat templates, and where they run
codec.py  subwords.py  alphabet.py    tokenizers: of Hugging Face folders; bytes and characters
llama.py       how spaces are read where the settings name LlamaTokenizer
files.py       what lies beside a tokenizer
spelling.py  growing.py               what each token adds to a text; stop strings
grammars.py  examiner.py  matcher.py  constraints
```
"""

from gpuinfer.text.language.growing import Growing
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.matcher import Matcher
from gpuinfer.text.language.open_language import open_language

__all__ = ["Growing", "Language", "Matcher", "open_language"]
