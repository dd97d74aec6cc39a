"""A server that classifies pictures, for a file that was exported with preprocess=true softmax=true.

MODEL=best.onnx uvicorn serve:app
curl --form picture=@cat.jpg localhost:8000/classify
"""

import json
import os

import onnxruntime
from fastapi import FastAPI, UploadFile
from read_image import read_image

session = onnxruntime.InferenceSession(os.environ["MODEL"])
facts = session.get_modelmeta().custom_metadata_map
names = json.loads(facts["class_names"])
app = FastAPI()


@app.post("/classify")
def classify(picture: UploadFile) -> dict[str, float]:
    """The five likeliest classes with their probabilities."""
    pixels = read_image(picture.file.read(), facts)
    (probabilities,) = session.run(["probabilities"], {"images": pixels[None]})
    ranked = sorted(zip(probabilities[0].tolist(), names, strict=True), reverse=True)
    return {name: probability for probability, name in ranked[:5]}
