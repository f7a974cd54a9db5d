// A model's Markdown → elements of a page, for the pages of `qsample serve` and `qsample web`. The text is hostile: its
// HTML stays text, its links lead to the web or to mail only, and its images are links, because a page that loaded
// them would tell their server what a conversation is about.
import MarkdownIt from "./markdown-it.esm.min.mjs";

const markdown = new MarkdownIt({ html: false, breaks: true, linkify: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // setup.py is no address
markdown.disable("image");
markdown.validateLink = (address) => /^(https?:\/\/|mailto:)/i.test(address);

const { rules } = markdown.renderer;
rules.link_open = (tokens, place, options, env, renderer) => {
  tokens[place].attrSet("target", "_blank");
  tokens[place].attrSet("rel", "noopener noreferrer");
  return renderer.renderToken(tokens, place, options);
};
// What is wider than the page scrolls in a box of its own, also by keyboard.
rules.table_open = () => '<div class="table" tabindex="0"><table>';
rules.table_close = () => "</table></div>";
rules.fence = rules.code_block = (tokens, place) => {
  const { escapeHtml } = markdown.utils, { info, content } = tokens[place];
  const language = info.trim().split(/\s/)[0];
  return `<div class="code"><div><span>${escapeHtml(language)}</span><button type="button">Copy</button></div>` +
    `<pre tabindex="0"><code>${escapeHtml(content)}</code></pre></div>`;
};

/** Show a text in an element. If the text has grown, the blocks that are the same stay, with a reader's selection. */
export function showMarkdown(element, text) {
  const template = document.createElement("template");
  template.innerHTML = markdown.render(text);
  const blocks = [...template.content.children], shown = [...element.children];
  const changed = blocks.findIndex((block, place) => !shown[place]?.isEqualNode(block));
  const kept = changed < 0 ? blocks.length : changed;
  for (const block of shown.slice(kept)) block.remove();
  element.append(...blocks.slice(kept));
  element.classList.add("markdown");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".markdown .code button");
  if (!button) return;
  getSelection().selectAllChildren(button.closest(".code").querySelector("code"));
  // navigator.clipboard is for https and localhost; a phone may have opened the page at http://192.168.0.2.
  const copied = document.execCommand("copy");
  button.textContent = copied ? "Copied" : "Selected";
});

const style = document.createElement("style");
style.textContent = `
  .markdown { overflow-wrap: anywhere; }
  .markdown > * { margin: 0 0 .75rem; }
  .markdown p { white-space: normal; }
  .markdown :is(h1, h2, h3, h4, h5, h6) { margin-top: .25rem; color: inherit; font-size: 1.05rem; font-weight: 650; line-height: 1.35; }
  .markdown h1 { font-size: 1.3rem; }
  .markdown h2 { font-size: 1.15rem; }
  .markdown :is(ul, ol) { padding-left: 1.6rem; }
  .markdown li > :is(p, ul, ol) { margin: 0 0 .25rem; }
  .markdown blockquote { padding-left: .9rem; border-left: 3px solid var(--line); color: var(--quiet); }
  .markdown hr { border: 0; border-top: 1px solid var(--line); }
  .markdown a { display: inline; min-width: 0; min-height: 0; padding: 0; text-decoration: underline; }
  .markdown code { padding: .1em .3em; border-radius: 4px; background: var(--page); font: .9em/1.5 ui-monospace, monospace; }
  .markdown .code { border: 1px solid var(--line); border-radius: 8px; background: var(--page); }
  .markdown .code > div { display: flex; align-items: center; justify-content: space-between; padding-left: .8rem; font-size: .85rem; color: var(--quiet); }
  .markdown .code button { min-width: 5rem; border-color: transparent; background: none; color: var(--accent); }
  .markdown pre { margin: 0; padding: 0 .8rem .7rem; overflow-x: auto; border-radius: 8px; }
  .markdown pre code { padding: 0; overflow-wrap: normal; }
  .markdown .table { overflow-x: auto; }
  .markdown table { border-collapse: collapse; }
  .markdown :is(th, td) { padding: .3rem .6rem; border: 1px solid var(--line); overflow-wrap: normal; }
`;
document.head.append(style);
