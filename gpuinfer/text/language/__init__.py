"""Language: from prompts to tokens, from tokens to text as it grows, and what an answer must match.

```
of_checkpoint.py   which of them a checkpoint has    files.py   what lies beside its weights
language.py        all of it together
subwords.py        tokenizers of folders
spelling.py        what each token adds to a text    growing.py   a text as it grows
chat.py            chat templates           sandbox.py    where they run
matcher.py         an answer kept to its grammar
grammars.py        grammars of constraints           examiner.py  their cost, tried
```
"""

from gpuinfer.text.language.growing import Growing
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.matcher import Matcher
from gpuinfer.text.language.of_checkpoint import has_chat_template, open_language

__all__ = ["Growing", "Language", "Matcher", "has_chat_template", "open_language"]
