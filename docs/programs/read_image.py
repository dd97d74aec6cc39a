"""The pixels of a picture for an exported file: uint8 [channels, height, width]"""

import io
import json
import math

import numpy as np
from PIL import Image, ImageOps


def read_image(picture, facts):
    """Read a picture, a path or bytes, as `longseq predict` does; `facts` are the metadata of the exported file."""
    size, channels = json.loads(facts["img_size"]), int(facts["in_chans"])
    height, width = size if isinstance(size, list) else (size, size)
    mode = facts["crop_mode"]
    # Pillow 13 misreads turned TIFF files that it opens by their names.
    with io.BytesIO(picture) if isinstance(picture, bytes) else open(picture, "rb") as file:
        image = ImageOps.exif_transpose(Image.open(file))
    if image.mode[0] in "IF":  # grey of 16 bits, or floats in 0..1
        white = 1 if image.mode == "F" else 65535
        image = Image.fromarray(np.rint(np.asarray(image) * (255 / white)).astype(np.uint8))
    if image.mode == "LAB":  # which Pillow cannot convert to grey
        image = image.convert("RGB")
    image = image.convert("RGB" if channels == 3 else "L")
    scaled = [math.floor(side / float(facts["crop_pct"])) for side in (width, height)]
    ratios = [side / wanted for side, wanted in zip(image.size, scaled, strict=True)]
    if mode == "squash":
        resized = scaled
    elif mode == "center" and width == height:
        resized = [scaled[0] * side // min(image.size) for side in image.size]
    else:
        ratio = max(ratios) if mode == "border" else min(ratios)
        resized = [max(1, round(side / ratio)) for side in image.size]
    image = image.resize(resized, Image.Resampling[facts["interpolation"].upper()])
    fill = json.loads(facts["mean"]) if mode == "border" else [0] * channels
    canvas = Image.new(image.mode, (width, height), tuple(round(255 * value) for value in fill))
    spare = [kept - side for side, kept in zip(resized, (width, height), strict=True)]
    canvas.paste(image, tuple(side // 2 if side > 0 else round(side / 2) for side in spare))
    return np.array(canvas).reshape(height, width, channels).transpose(2, 0, 1)
