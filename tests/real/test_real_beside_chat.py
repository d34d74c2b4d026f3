"""What OpenAI's clients ask for beside chat, of real weights: embeddings as transformers has them, calls that parse,
and passages that are found.
"""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from serving.replica_servers import serving

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("children_forked")]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}]
PASSAGES = {
    "Which river flows through Paris?": "The Seine is a river that flows through Paris into the English Channel.",
    "How do plants make energy from light?": "Photosynthesis turns light into chemical energy in plants.",
    "Who created Python?": "Python is a programming language created by Guido van Rossum.",
    "What is the highest mountain?": "Mount Everest is the highest mountain on Earth.",
}


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    room = tmp_path_factory.mktemp("served")
    words = ("--model", folder, "--served-model-name", "smollm2", "--tool-format", "hermes", "-B", "slots=8")
    with serving(*words, folder=room) as server:
        yield server.openai, server


def test_embeddings_are_transformers_last_states(served, folder):
    import torch
    import transformers

    client, _ = served
    texts = [*PASSAGES, *PASSAGES.values(), "word " * 600]
    told = client.embeddings.create(model="smollm2", input=texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for text, one in zip(texts, told.data, strict=True):
        with torch.inference_mode():
            state = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1].numpy()
        assert np.abs(np.array(one.embedding) - state / np.linalg.norm(state)).max() < 5e-5


def test_calls_parse_and_name_the_city(served):
    client, _ = served
    cities = ["Paris", "Rome", "Berlin", "Oslo"]
    for city in cities:
        chat = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"What is the weather in {city} in celsius?"}],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
        )
        (call,) = chat.choices[0].message.tool_calls
        given = json.loads(call.function.arguments)
        jsonschema.validate(given, CITY)
        assert given == {"city": city, "unit": "celsius"}


def test_questions_find_their_passages(served):
    _, server = served
    passages = list(PASSAGES.values())
    for index, question in enumerate(PASSAGES):
        told = server.ask("/rerank", {"query": question, "documents": passages}).json
        assert told["results"][0]["index"] == index
