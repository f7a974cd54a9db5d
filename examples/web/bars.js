// The likeliest tokens at each place of the newest text, as bars; a slider goes back to earlier places.
import { at, make } from "./settings.js";

const SHOWN = 10;

export class Bars {
  /** The pieces that came with alternatives, a token each. */
  #pieces = [];
  /** Whether the newest token is shown, as long as nobody moves the slider. */
  #follows = true;

  constructor() {
    at("place").addEventListener("input", () => {
      this.#follows = Number(at("place").value) === this.#pieces.length;
      this.#draw();
    });
  }

  clear() {
    this.#pieces = [];
    this.#follows = true;
    at("next").hidden = true;
  }

  add(piece) {
    if (!piece.topLogprobs || piece.token === null) return; // of a package without this output
    this.#pieces.push(piece);
    at("place").max = this.#pieces.length;
    if (this.#follows) at("place").value = this.#pieces.length;
    at("next").hidden = false;
    this.#draw();
  }

  #draw() {
    const place = Number(at("place").value), { token, text, logprob, topLogprobs } = this.#pieces[place - 1];
    const listed = topLogprobs.slice(0, SHOWN);
    if (!listed.some((one) => one.token === token) && logprob !== undefined) {
      listed.push({ token, logprob, text: topLogprobs.find((one) => one.token === token)?.text ?? text });
    }
    at("place-name").textContent = `Token ${place} of ${this.#pieces.length}`;
    at("bars").replaceChildren(...listed.map((one) => {
      const percent = 100 * Math.exp(one.logprob), drawn = one.token === token;
      const bar = make("span", { className: "bar" });
      bar.style.width = `${percent}%`;
      return make("li", {},
        make("span", { textContent: drawn ? "●" : "", ariaLabel: drawn ? "drawn" : null }),
        make("code", { textContent: JSON.stringify(one.text) }),
        make("span", {}, bar),
        make("span", { className: "percent", textContent: `${percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %` }));
    }));
  }
}
