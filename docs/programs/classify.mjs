// Classifies pictures in node, with a file that was exported with preprocess=true softmax=true.
// node classify.mjs best.onnx cat.jpg dog.jpg

import { readFile } from "node:fs/promises";
import ort from "onnxruntime-node";
import sharp from "sharp";

const [model, ...pictures] = process.argv.slice(2);
const facts = JSON.parse(await readFile(`${model}.json`, "utf8"));
const session = await ort.InferenceSession.create(model);
const [height, width] = [facts.img_size, facts.img_size].flat();
const fit = { center: "cover", squash: "fill", border: "contain" }[facts.crop_mode];
const [red, green, blue] = [...facts.mean, ...facts.mean, ...facts.mean].map((part) => Math.round(255 * part));
const kernel = { bilinear: "linear", bicubic: "cubic", nearest: "nearest" }[facts.interpolation];

for (const picture of pictures) {
  const scaled = [width, height].map((side) => Math.floor(side / facts.crop_pct));
  const [left, top] = [(scaled[0] - width) >> 1, (scaled[1] - height) >> 1];
  const pixels = await sharp(picture)
    .rotate()
    .resize(...scaled, { fit, kernel, background: { r: red, g: green, b: blue } })
    .extract({ left, top, width, height })
    .removeAlpha()
    .toColourspace(facts.in_chans === 1 ? "b-w" : "srgb")
    .raw()
    .toBuffer();
  const images = new Uint8Array(pixels.length);
  for (let i = 0; i < pixels.length; i++)
    images[(i % facts.in_chans) * height * width + Math.floor(i / facts.in_chans)] = pixels[i];
  const shape = [1, facts.in_chans, height, width];
  const { probabilities } = await session.run({ images: new ort.Tensor("uint8", images, shape) });
  const best = probabilities.data.indexOf(Math.max(...probabilities.data));
  console.log(picture, facts.class_names[best], probabilities.data[best].toFixed(4));
}
