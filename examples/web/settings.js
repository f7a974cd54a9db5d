// The settings: sliders ↔ options of `generate` ↔ the fragment of a link that reproduces a text.
import { loadGrammar } from "qsample-onnx";

export const at = (id) => document.getElementById(id);
export function make(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

// The options of `generate` that a slider sets: label, smallest, largest, step, and the value at the start.
const SLIDERS = {
  temperature: ["Temperature", 0, 2, 0.01, 0.8],
  topK: ["Top k", 0, 200, 1, 0],
  topP: ["Top p", 0.01, 1, 0.01, 0.95],
  minP: ["Min p", 0, 1, 0.01, 0],
  repetitionPenalty: ["Repetition penalty", 0.5, 2, 0.01, 1],
  presencePenalty: ["Presence penalty", -2, 2, 0.05, 0],
  frequencyPenalty: ["Frequency penalty", -2, 2, 0.05, 0],
};
const FIELDS = [...Object.keys(SLIDERS), "maxNewTokens", "seed"];
export const MOST_IN_A_TEXT = 100; // tokens, if the field is empty; a chat may fill the context

for (const [name, [label, min, max, step, value]] of Object.entries(SLIDERS)) {
  const slider = make("input", { id: name, type: "range", min, max, step });
  const shown = make("output");
  slider.setAttribute("form", "form");
  slider.addEventListener("input", () => { shown.value = slider.value; });
  at("fields").append(make("label", { className: "wide", htmlFor: name }, `${label} `, shown, slider));
  set(name, value);
}

/** Set a field, as a user would. */
export function set(name, value) {
  at(name).value = value;
  at(name).dispatchEvent(new Event("input"));
}

/** The options of `generate`. A seed is drawn here if none is given, so that the text can be written again. */
export function options(chat) {
  const sliders = Object.fromEntries(Object.keys(SLIDERS).map((name) => [name, Number(at(name).value)]));
  const seed = at("seed").value || String(crypto.getRandomValues(new Uint32Array(1))[0]);
  // The graph's off values are transformers' too: what a slider does not ask for, a generation_config.json does not add.
  const most = at("maxNewTokens").value || (chat ? "" : MOST_IN_A_TEXT);
  // A total length is cut to the context's.
  return { ...sliders, ...(most ? { maxNewTokens: Number(most) } : { maxLength: 2 ** 31 - 1 }), seed };
}

/** The form that the answer follows, from the chosen file; null for any text. */
export async function chosenGrammar() {
  const [file] = at("grammar").files;
  return file ? loadGrammar(await file.arrayBuffer()) : null;
}

/** A link to what `generate(prompt, options)` writes with this package. prompt: a text, or a conversation's messages. */
export function link(prompt, given, packageHash) {
  const about = typeof prompt === "string" ? { prompt } : { messages: JSON.stringify(prompt) };
  const { maxLength, ...shown } = given; // what an empty field means
  return `#${new URLSearchParams({ ...about, ...shown, package: packageHash })}`;
}

/** What the page's own link says: `{ prompt, messages, packageHash }`, with the settings filled in; null without one. */
export function fromLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  const prompt = given.get("prompt");
  let messages = null;
  try { messages = JSON.parse(given.get("messages")); } catch { /* a link that was cut off */ }
  if (prompt === null && !isConversation(messages)) return null;
  for (const name of FIELDS) if (given.has(name)) set(name, given.get(name));
  if (!given.has("maxNewTokens")) set("maxNewTokens", "");
  set("grammar", ""); // a link has no form
  return { prompt, messages, packageHash: given.get("package") };
}

const isConversation = (messages) => Array.isArray(messages) && messages.at(-1)?.role === "user" &&
  messages.every((message) => typeof message?.content === "string");
