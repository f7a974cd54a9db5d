// Text to tokens, and tokens to text as they come: whole characters, cut off before a stop string.
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import { ArgumentError, PackageError, shown } from "./errors.js";

// A low and a high byte that continue a character, as vocabularies with byte fallback and byte-level ones spell them.
const CONTINUING = [["<0x80>", "Ģ"], ["<0xB0>", "°"]];

/** A package's tokenizer.json. */
export class Tokenizer {
  private readonly tokenizer: HuggingFaceTokenizer;
  private completing?: number[][];
  private readonly special = new Set<number>();

  /** The tokenizer may have more tokens than the `vocabSize` of the model, which texts must not have. */
  constructor(description: object, config: object, private readonly vocabSize: number, where: string) {
    try {
      // As the file says: transformers' own clean-ups, which the config asks for, are no part of it.
      this.tokenizer = new HuggingFaceTokenizer(description, { ...config, remove_space: false, do_lowercase_and_remove_accent: false });
    } catch (error) {
      throw new PackageError(`tokenizer.json of ${where} cannot be used: ${(error as Error).message}; export the package again`, { cause: error });
    }
    for (const [id, token] of this.tokenizer.get_added_tokens_decoder()) {
      if (token.special) this.special.add(id);
    }
  }

  encode(text: string, { addSpecialTokens = true } = {}): number[] {
    if (!text.isWellFormed()) throw new ArgumentError(`a text has half of a character (a lone surrogate): ${shown(text)}; give text.toWellFormed()`);
    const ids: number[] = this.tokenizer.encode(text, { add_special_tokens: addSpecialTokens }).ids;
    const lacked = ids.find((id) => id >= this.vocabSize);
    if (lacked !== undefined) {
      throw new ArgumentError(
        `a text has ${shown(this.tokenizer.id_to_token(lacked))}, token ${lacked} of the tokenizer, and the model has ${this.vocabSize} tokens, ` +
          `0 to ${this.vocabSize - 1}, so it cannot read that; leave it out of the text`);
    }
    return ids;
  }

  decode(ids: readonly number[], { skipSpecialTokens = true } = {}): string {
    const kept = ids.filter((id) => !this.isSkipped(id, skipSpecialTokens));
    return kept.length ? this.tokenizer.decode(kept, { skip_special_tokens: false, clean_up_tokenization_spaces: false }) : "";
  }

  /** Sequences of tokens, one of which completes any incomplete character; none if the vocabulary has no bytes. */
  get completions(): number[][] {
    if (!this.completing) {
      const [low, high] = CONTINUING.map((spellings) => this.byteToken(spellings));
      const complete = low !== undefined && high !== undefined;
      this.completing = complete ? [[low], [low, low], [low, low, low], [high], [high, low], [high, low, low]] : [];
    }
    return this.completing;
  }

  /** The token of a byte, which alone is no text. */
  private byteToken(spellings: readonly string[]): number | undefined {
    const ids = spellings.map((spelling) => this.tokenizer.token_to_id(spelling));
    return ids.find((id) => id !== undefined && this.decode([id]) === REPLACEMENT);
  }

  /** Whether `decode` leaves a token out wherever it stands: a special token, or an id without a token. */
  isSkipped(id: number, skipSpecialTokens = true): boolean {
    return (skipSpecialTokens && this.special.has(id)) || this.tokenizer.id_to_token(id) === undefined;
  }
}

const REPLACEMENT = "\ufffd"; // an incomplete multi-byte character decodes to it
const INCOMPLETE = 3; // most bytes of an incomplete character
const CONTEXT = 8; // prompt tokens that decide how the first new token is spelled, with or without a space
const MOST_TOKENS = 32; // decoded for a new token: beyond that, all but the last half are forgotten

const withoutEnd = (text: string): string => text.replace(/\ufffd+$/, "");

/** Turns tokens into text as they come; text is held back while it may be an incomplete character. */
export class IncrementalDecoder {
  private ids: number[];
  private given: string; // the part of the text of `ids` that was returned, or is of the prompt
  private context: number; // the length of `ids` when nothing was held back
  private changes = 0; // tokens since the returned text decodes to another text

  constructor(private readonly tokenizer: Tokenizer, prompt: readonly number[]) {
    this.ids = prompt.slice(-CONTEXT);
    this.given = tokenizer.decode(this.ids);
    this.context = this.ids.length;
  }

  put(token: number): string {
    if (this.tokenizer.isSkipped(token)) return "";
    this.ids.push(token);
    const text = this.tokenizer.decode(this.ids);
    const held = Math.min(text.length - withoutEnd(text).length, INCOMPLETE);
    // Byte fallback: the first bytes of a character make those before it invalid, too, until it is complete.
    this.changes = text.startsWith(this.given) ? 0 : this.changes + 1;
    if (held && this.changes > 0 && this.changes <= INCOMPLETE) return "";
    const start = this.known(text);
    const end = text.length - held;
    if (end > start) {
      this.given = text.slice(0, end);
      if (!held) {
        // The last tokens stay as context: the spelling of a token can depend on the token before.
        this.ids = this.ids.slice(this.context);
        this.given = this.tokenizer.decode(this.ids);
        this.context = this.ids.length;
      }
    }
    if (this.ids.length > MOST_TOKENS) this.forget(text.length - Math.max(start, end));
    return text.slice(start, Math.max(start, end));
  }

  /** The text that was held back, except a character whose last bytes are missing. */
  end(): string {
    const text = this.withoutIncomplete(this.tokenizer.decode(this.ids));
    const piece = text.slice(this.known(text));
    this.given = text;
    return piece;
  }

  /** `text`, of `ids`, without an incomplete character at its end: one that further bytes complete. */
  private withoutIncomplete(text: string): string {
    if (!text.endsWith(REPLACEMENT)) return text;
    for (const rest of this.tokenizer.completions) {
      const completed = this.tokenizer.decode([...this.ids, ...rest]);
      if (!completed.endsWith(REPLACEMENT)) return [...completed].slice(0, -1).join("");
    }
    return text;
  }

  /** The number of characters of `text` that were returned. */
  private known(text: string): number {
    if (text.startsWith(this.given)) return this.given.length;
    const whole = withoutEnd(this.given);
    if (!text.startsWith(whole)) return whole.length;
    let rest = whole.length; // a new token completes a character that the prompt ended inside
    while (text[rest] === REPLACEMENT) rest += 1;
    return Math.min(this.given.length, rest);
  }

  private forget(held: number): void {
    const dropped = this.ids.length - MOST_TOKENS / 2;
    this.ids = this.ids.slice(dropped);
    this.context = Math.max(0, this.context - dropped);
    const text = this.tokenizer.decode(this.ids);
    this.given = text.slice(0, Math.max(0, text.length - held));
  }
}

/** Finds the stop string that is complete first, of several with the same end the longest, however the text is cut. */
export class StopStrings {
  match: string | null = null;
  private held = "";
  /** Whether each character of `held` is of a token that has no text in the answer. */
  private hidden: boolean[] = [];

  constructor(private readonly strings: readonly string[]) {}

  /** The text that `piece` makes certain; "" after a stop string. A hidden piece may be of a stop string, and is never returned. */
  put(piece: string, { isHidden = false } = {}): string {
    if (this.match !== null) return "";
    const text = this.held + piece;
    this.held = text;
    this.hidden.push(...Array<boolean>(piece.length).fill(isHidden));
    let end = Infinity;
    for (const stop of this.strings) {
      const place = text.indexOf(stop);
      const stopEnd = place + stop.length;
      if (place >= 0 && (stopEnd < end || (stopEnd === end && stop.length > this.match!.length))) {
        end = stopEnd;
        this.match = stop;
      }
    }
    if (this.match !== null) {
      const before = this.release(end - (this.match as string).length);
      this.release(this.held.length);
      return before;
    }
    const open = this.strings.map((stop) => overlap(text, stop));
    return this.release(text.length - Math.max(0, ...open));
  }

  end(): string {
    return this.release(this.held.length);
  }

  /** The first `length` characters of the held text, without the hidden ones. */
  private release(length: number): string {
    const released = this.held.slice(0, length);
    const hidden = this.hidden.splice(0, length);
    this.held = this.held.slice(length);
    return hidden.includes(true) ? released.split("").filter((_, place) => !hidden[place]).join("") : released;
  }
}

/** The length of the longest end of `text` that begins `stop`. */
function overlap(text: string, stop: string): number {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length -= 1) {
    if (text.endsWith(stop.slice(0, length))) return length;
  }
  return 0;
}

/** The text of a row as its tokens come, up to its first stop string or its stop token. */
export class GeneratedText {
  private readonly decoder: IncrementalDecoder;
  private readonly stops: StopStrings;
  whole = "";

  constructor(private readonly tokenizer: Tokenizer, prompt: readonly number[], stops: readonly string[]) {
    this.decoder = new IncrementalDecoder(tokenizer, prompt);
    this.stops = new StopStrings(stops);
  }

  get stopped(): boolean {
    return this.stops.match !== null;
  }

  /** The text that `token` makes certain; none of a stop token, which ends the row. */
  put(token: number, { isStopToken = false } = {}): string {
    if (isStopToken) return "";
    if (this.tokenizer.isSkipped(token)) {
      // As in transformers, stop strings may be special tokens, or have some in them.
      return this.add(this.stops.put(this.tokenizer.decode([token], { skipSpecialTokens: false }), { isHidden: true }));
    }
    return this.add(this.stops.put(this.decoder.put(token)));
  }

  end(): string {
    return this.add(this.stops.put(this.decoder.end()) + this.stops.end());
  }

  private add(piece: string): string {
    this.whole += piece;
    return piece;
  }
}
