"""Classify texts with an exported model: classify("classify.onnx", TEXTS) gives the classes of each."""

import json

import numpy as np
import onnxruntime


def encoder(tokenizer):
    """The function from a text to its tokens."""
    if tokenizer["kind"] == "bytes":
        return lambda text: list(text.encode())
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(tokenizer["json"])
    library.encode_special_tokens = True  # their names in a text are text
    return lambda text: library.encode(text, add_special_tokens=False).ids


def cut(tokens, most, truncation):
    """Truncate a document as in training."""
    surplus = max(0, len(tokens) - most)
    start = {"head": most, "tail": 0}.get(truncation, -(-most // 2))
    return tokens[surplus // 2 :][:most] if truncation == "middle" else tokens[:start] + tokens[start + surplus :]


def classify(path, texts, prepare=None):
    """The probability of each class for each text; `prepare` is the function that the metadata call `preparation`."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    names, encode = json.loads(facts["class_names"]), encoder(json.loads(facts["tokenizer"]))
    if prepare is None and "preparation" in facts:
        raise ValueError(f"this model needs prepare={facts['preparation']}")
    documents = [encode(prepare(text) if prepare else text) for text in texts]
    if "max_length" in facts:  # the separator takes one of these
        documents = [cut(tokens, int(facts["max_length"]) - 1, facts["truncation"]) for tokens in documents]
    lengths = np.array([1 + len(tokens) for tokens in documents])
    rows = np.full((len(texts), lengths.max()), int(facts["separator"]))
    for row, tokens in zip(rows, documents, strict=True):
        row[1 : 1 + len(tokens)] = tokens
    (found,) = session.run(None, {"tokens": rows, "lengths": lengths})
    return [dict(zip(names, row.tolist(), strict=True)) for row in found]
