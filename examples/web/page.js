// The page: a package, opened once; prompts, and what the model writes after them.
import { ArgumentError, load, PackageError, webGpuProblem } from "qsample-onnx";
import { showMarkdown } from "../../qsample/addons/serve/markdown/markdown.js";
import { Bars } from "./bars.js";
import { at, chosenGrammar, fromLink, link, make, MOST_IN_A_TEXT, options, set } from "./settings.js";

const PACKAGE = new URL("package/", location.href);
const NAMES = { webgpu: "WebGPU", wasm: "WebAssembly" };

/** The open package; null before, and after an error of the device. */
let model = null;
/** Aborts what runs: a generation, or the opening of the package. */
let running = null;
/** The turns of the conversation: { said, heard, article }. */
const turns = [];
/** Whether the user wants chats, if the model has a template. */
let wantsChat = true;
const bars = new Bars();
const chatting = () => at("as-chat").checked;
at("settings").open = matchMedia("(min-width: 56rem)").matches;
// A browser shows its complaint about a field only if the field is visible.
at("settings").addEventListener("invalid", () => { at("settings").open = true; }, true);

/** Show a message. Screen readers get it too, or `aloud` in its place: whole texts, never a token at a time. */
function say(text, { wrong = false, aloud = text } = {}) {
  at("note").textContent = text;
  at("note").classList.toggle("error", wrong);
  at("spoken").textContent = aloud;
}

/** Run `work(signal)`, so that Stop and Esc can end it; its errors are shown. */
async function stoppable(work) {
  running = new AbortController();
  showState();
  try {
    await work(running.signal);
  } catch (error) {
    if (running.signal.aborted) say("Stopped");
    else say(error.message, { wrong: true });
  }
  running = null;
  showState();
}

// --- the package

/** Open the package on the chosen device. "auto" is WebGPU if it is there and runs the package, otherwise WebAssembly. */
async function open(signal) {
  await model?.dispose();
  model = null;
  at("about").textContent = at("remark").textContent = "";
  say("", { aloud: "Loading the model" });
  let problem = null;
  if (at("device").value === "auto") {
    problem = await webGpuProblem();
    if (!problem) {
      try {
        model = await opened("webgpu", signal);
      } catch (error) {
        if (signal.aborted || error instanceof PackageError) throw error;
        problem = "WebGPU does not run this package here";
        console.warn(error);
      }
    }
    model ??= await opened("wasm", signal);
  } else {
    model = await opened(at("device").value, signal);
  }
  const { files, source } = model.manifest;
  const size = Object.values(files).reduce((sum, file) => sum + file.bytes, 0);
  at("about").textContent = `${source.model_id.split(/[\\/]/).at(-1)}, ${(size / 1e6).toFixed(0)} MB, on ${NAMES[model.device]}`;
  at("remark").textContent = problem && `WebAssembly is slower than WebGPU, but ${problem}.`;
  say("", { aloud: `Ready. ${at("about").textContent}. ${at("remark").textContent}` });
}

async function opened(device, signal) {
  at("loading").hidden = false;
  try {
    const made = await load(PACKAGE, {
      device, signal, worker: true,
      progress: ({ loaded, total }) => Object.assign(at("loading"), { max: total || 1, value: loaded }),
    });
    try { // a device may lack what a kernel needs, which shows in the first step
      await made.generate([made.manifest.token_ids.bos ?? 0], { maxNewTokens: 1, signal }).output();
    } catch (error) {
      await made.dispose();
      throw error;
    }
    return made;
  } finally {
    at("loading").hidden = true;
  }
}

const packageHash = () => {
  const { files } = model.manifest;
  return (files["decoder.onnx.data"] ?? files["decoder.onnx"]).sha256.slice(0, 12);
};

// --- texts

/** The article of an answer, with its places for the text and for what is to be said about it. */
function addArticle(chat, said) {
  const answer = make(chat ? "div" : "span", { className: "answer" }), facts = make("span"), footer = make("footer", {}, facts);
  const article = chat
    ? make("article", {}, make("h2", { textContent: "You" }), make("p", { className: "given", textContent: said }),
           make("h2", { textContent: "Model" }), answer, footer)
    : make("article", {}, make("p", {}, make("span", { className: "given", textContent: said }), answer), footer);
  article.setAttribute("aria-busy", "true");
  at(chat ? "turns" : "texts").append(article);
  return { article, answer, facts, footer };
}

/** Show an answer: Markdown in a chat. */
function show(chat, answer, text) {
  if (chat) showMarkdown(answer, text);
  else answer.textContent = text;
}

/** The conversation up to now, and `said`. */
const messages = (said) => [
  ...(at("system").value ? [{ role: "system", content: at("system").value }] : []),
  ...turns.flatMap((turn) => [{ role: "user", content: turn.said }, { role: "assistant", content: turn.heard }]),
  { role: "user", content: said },
];

async function generate(signal) {
  if (!model) await open(signal);
  const chat = chatting() && model.hasChatTemplate, said = at("prompt").value, given = options(chat);
  const grammar = await chosenGrammar();
  const prompt = chat ? messages(said) : said;
  const { article, answer, facts, footer } = addArticle(chat, said);
  if (chat) at("prompt").value = "";
  bars.clear();
  say("", { aloud: "Generating" });
  article.scrollIntoView({ block: "nearest" });
  const began = performance.now();
  let heard = "", tokens = 0, first = 0, reason = null, wrong = null, frame = 0;
  const draw = () => {
    frame = 0;
    show(chat, answer, heard);
  };
  const speed = () => tokens > 1 ? `, ${((tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} a second` : "";
  try {
    for await (const piece of model.generate(prompt, { ...given, grammar, signal })) {
      signal.throwIfAborted(); // several pieces may have come at once
      first ||= performance.now();
      tokens += Number(piece.token !== null);
      heard += piece.text;
      frame ||= requestAnimationFrame(draw);
      bars.add(piece);
      reason = piece.finishReason;
      facts.textContent = `${tokens} token${tokens === 1 ? "" : "s"}${speed()}`;
    }
  } catch (error) {
    if (signal.aborted) reason = "you";
    else wrong = error;
  }
  cancelAnimationFrame(frame);
  draw();
  article.setAttribute("aria-busy", "false");
  if (tokens) {
    const cut = tokens === given.maxNewTokens ? `the limit of ${tokens} tokens` : "the end of the context";
    const ending = reason === "length" ? `cut off by ${cut}` : reason ? `ended by ${reason}` : "not finished";
    facts.textContent += `, the first after ${(first - began).toFixed(0)} ms, ${ending}. Seed ${given.seed}`;
    const use = make("button", { type: "button", className: "plain", textContent: "Use this seed", onclick() {
      at("seed").value = given.seed;
      at("spoken").textContent = `Seed ${given.seed} is set`;
    } });
    footer.append(use);
    // A link cannot carry the form.
    if (!grammar) footer.append(make("a", { href: link(prompt, given, packageHash()), textContent: "Link to this text" }));
    if (chat) turns.push({ said, heard, article });
  } else { // nothing came: the message is the user's to send again
    article.remove();
    if (chat) at("prompt").value ||= said;
  }
  if (wrong) {
    if (!(wrong instanceof ArgumentError)) { // the device may be lost: the next text opens the package again
      await model.dispose().catch(() => {});
      model = null;
    }
    throw wrong;
  }
  const ending = reason === "you" ? "Stopped" : reason === "invalid" ? "The model returned invalid logits" : "";
  say(ending, { wrong: reason === "invalid", aloud: [heard, ending || facts.textContent].join("\n") });
}

/** What the page's link asks for, if it asks for anything. */
async function follow() {
  const asked = fromLink();
  if (!asked || running) return;
  wantsChat = Boolean(asked.messages);
  showState();
  if (asked.messages) {
    clear(turns, at("turns"));
    const said = asked.messages.filter(({ role }) => role !== "system").map(({ content }) => content);
    at("system").value = asked.messages.find(({ role }) => role === "system")?.content ?? "";
    for (let i = 0; i + 2 < said.length; i += 2) {
      const { article, answer } = addArticle(true, said[i]);
      show(true, answer, said[i + 1]);
      article.setAttribute("aria-busy", "false");
      turns.push({ said: said[i], heard: said[i + 1], article });
    }
    at("prompt").value = said.at(-1);
  } else {
    at("prompt").value = asked.prompt;
  }
  await stoppable(async (signal) => {
    if (!model) await open(signal);
    await generate(signal);
    if (asked.packageHash && asked.packageHash !== packageHash()) {
      say("This link was made with another package: its text may differ from this one.");
    }
  });
}

// --- controls

function showState() {
  const possible = model?.hasChatTemplate ?? true, busy = Boolean(running);
  at("no-chat").hidden = possible;
  at(possible && wantsChat ? "as-chat" : "as-text").checked = true;
  const chat = chatting(), shown = at(chat ? "turns" : "texts");
  at("texts").hidden = chat;
  at("turns").hidden = at("system-line").hidden = !chat;
  at("prompt-name").textContent = chat ? "Your message" : "Text to continue";
  at("prompt").placeholder = chat ? "Ask something" : "And the LORD spake unto";
  at("prompt").enterKeyHint = chat ? "send" : "enter";
  at("maxNewTokens").placeholder = chat ? "no limit" : MOST_IN_A_TEXT;
  at("keys").textContent = chat ? "Enter sends, Shift + Enter makes a new line, Esc stops." : "Ctrl + Enter generates, Esc stops.";
  at("back").hidden = !chat || !turns.length;
  at("clear").hidden = !shown.hasChildNodes();
  at("clear").textContent = chat ? "New conversation" : "Clear";
  for (const name of ["back", "clear", "as-text", "device"]) at(name).disabled = busy;
  at("as-chat").disabled = busy || !possible;
  at("grammar-line").hidden = !model?.manifest.interface.features.grammars;
  at("no-grammar").hidden = at("grammar-line").hidden || !at("grammar").value;
  at("go").disabled = false;
  at("go").textContent = busy ? "Stop" : chat ? "Send" : "Generate";
  at("go").formNoValidate = busy; // an empty message is no reason not to stop
}

function clear(list, section) {
  list.length = 0;
  section.replaceChildren();
  bars.clear();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else stoppable(generate);
});
at("back").addEventListener("click", () => {
  const turn = turns.pop();
  turn.article.remove();
  at("prompt").value = turn.said;
  at("prompt").focus();
  bars.clear();
  say("", { aloud: "The last turn is taken back" });
  showState();
});
at("clear").addEventListener("click", () => {
  clear(chatting() ? turns : [], at(chatting() ? "turns" : "texts"));
  at("prompt").focus();
  say("", { aloud: "Cleared" });
  showState();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  // An Enter that ends a composition is the input method's; Safari marks it with the key code alone.
  if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return;
  const sends = chatting() && event.target === at("prompt") && !event.shiftKey;
  if (!sends && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  if (!running) at("form").requestSubmit();
});
for (const name of ["as-text", "as-chat"]) at(name).addEventListener("change", () => {
  wantsChat = chatting();
  showState();
});
at("grammar").addEventListener("input", showState);
at("no-grammar").addEventListener("click", () => {
  set("grammar", "");
  at("grammar").focus();
});
at("device").addEventListener("change", () => stoppable(open));
addEventListener("hashchange", follow);

if (fromLink()) follow();
else stoppable(open);
