"""Continue a text with an exported language model: python continue_text.py step.onnx TEXT"""

import base64
import json
import sys

import numpy as np
import onnxruntime


def start(state):
    """The value of a state before the first token: one row, which is empty along the axis past."""
    shape = [{"batch": 1, "past": 0}.get(size, size) for size in state["shape"]]
    if isinstance(state["start"], str):
        return np.frombuffer(base64.b64decode(state["start"]), state["dtype"]).reshape(shape)
    return np.full(shape, state["start"], state["dtype"])


def coders(tokenizer):
    """The functions from a text to its tokens and back."""
    if tokenizer["kind"] == "bytes":
        return (lambda text: list(text.encode())), (lambda tokens: bytes(tokens).decode(errors="replace"))
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(tokenizer["json"])
    library.encode_special_tokens = True  # their names in a text are text
    return (
        lambda text: library.encode(text, add_special_tokens=False).ids,
        lambda tokens: library.decode(tokens, skip_special_tokens=False),
    )


def continue_text(path, text, max_new_tokens=256):
    """The most probable continuation of a text, up to a token that ends it."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    states, separator, first, ends, tokenizer = (
        json.loads(facts[key]) for key in ("states", "separator", "start", "ends", "tokenizer")
    )
    encode, decode = coders(tokenizer)
    prompt, written = encode(text), []
    # A model that begins texts without a token reads the separator to begin a new one.
    read = (prompt or [separator]) if first is None else [first, *prompt]
    names, values = [state["input"] for state in states], [start(state) for state in states]
    for index in range(len(read) - 1 + max_new_tokens):
        token = np.array([[*read, *written][index]], np.int64)
        logits, *values = session.run(None, {"token": token, **dict(zip(names, values, strict=True))})
        if index >= len(read) - 1:  # the whole text is read
            best = int(logits[0].argmax())
            if best in ends:
                break
            written.append(best)
    return decode(prompt + written)[len(decode(prompt)) :]


if __name__ == "__main__":
    print(sys.argv[2] + continue_text(*sys.argv[1:3]))
