// What needs no package: options, stop strings, manifests.
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, symlink, truncate, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, expect, it } from "vitest";
import { ChatTemplates } from "../src/chat.js";
import { ArgumentError, DeviceError, fromData, OutOfMemoryError, PackageError, toData, translated } from "../src/errors.js";
import { Meter, openUrl } from "../src/files.js";
import { bindGrammars, isGrammar, loadGrammar } from "../src/grammars.js";
import { parseManifest } from "../src/manifest.js";
import { openFolder } from "../src/node_files.js";
import { checkNames, readableSeed, resolve, seedsOf } from "../src/options.js";
import { appliedSettings } from "../src/own_settings.js";
import { GeneratedText, StopStrings, Tokenizer } from "../src/text.js";

describe("options", () => {
  const values = (config: object, options: object): Record<string, unknown> => resolve(config as any, options).values;

  it("come in layers, as in transformers", () => {
    expect(values({}, {})).toMatchObject({ temperature: 0, top_k: 0 });
    expect(values({ do_sample: true, temperature: 0.6 }, { topP: 0.9 })).toMatchObject({ temperature: 0.6, top_k: 50, top_p: 0.9 });
    expect(values({}, { topP: 0.9 })).toMatchObject({ temperature: 1, top_k: 50 });
    expect(values({ do_sample: true, top_k: 20 }, { topK: null })).toMatchObject({ top_k: 0 });
    expect(values({ max_new_tokens: 9 }, { maxLength: 20 })).toMatchObject({ max_new_tokens: null, max_length: 20 });
    expect(resolve({ eos_token_id: [1, 2] }, { eosTokenId: null }).eos).toEqual([]);
    expect(resolve({ eos_token_id: 1, stop_strings: ["x"] }, {})).toMatchObject({ eos: [1], stop: ["x"] });
  });

  it.each([
    [{ temperature: -1 }, "temperature is -1; give a finite number >= 0"],
    [{ topP: 0 }, "topP is 0; give a number > 0"],
    [{ topK: 2.5 }, "topK is 2.5; give an integer"],
    [{ minP: NaN }, "minP is NaN; give"],
    [{ doSample: false, topP: 0.5 }, "doSample: false chooses greedily, yet topP: 0.5 is given"],
    [{ doSample: true, temperature: 0 }, "contradict"],
    [{ topK: -1 }, "topK is -1"],
    [{ minNewTokens: 5, maxNewTokens: 4 }, "minNewTokens is 5, more than"],
    [{ eosTokenId: "x" }, "eosTokenId is \"x\"; give a token id"],
    [{ stop: [""] }, "stop is"],
    [{ logitBias: { 3: "much" } }, "logitBias of token 3"],
  ])("%o is refused", (options, message) => {
    expect(() => resolve({}, options as any)).toThrow(message);
    expect(() => resolve({}, options as any)).toThrow(ArgumentError);
  });

  it("names are checked", () => {
    expect(() => checkNames({ top_p: 1 }, [])).toThrow("did you mean topP?");
    for (const name of ["constructor", "toString"]) expect(() => checkNames({ [name]: 1 }, [])).toThrow("the options are");
    for (const none of [null, 5, "ab", [1]]) expect(() => checkNames(none as any, [])).toThrow("give an object of options");
    expect(() => checkNames({ beams: 1 }, [])).toThrow("the options are");
  });

  it("biases add up, and suppressed tokens are forbidden", () => {
    const config = { suppress_tokens: [5, 5, 6], sequence_bias: [[[7], 1.5]] };
    const suppressed = [[5, -Infinity], [6, -Infinity]];
    expect(resolve(config, { logitBias: { 7: 2 } }).bias).toEqual([[7, 2], [7, 1.5], ...suppressed]);
    expect(resolve(config, { suppressTokens: null, sequenceBias: [[[8], -1]] }).bias).toEqual([[8, -1]]);
    expect(() => resolve({}, { sequenceBias: [[[7, 8], 1.5]] as any })).toThrow("sequenceBias is");
    expect(() => resolve({}, { suppressTokens: [-1] })).toThrow("suppressTokens is [-1]; give a token id");
  });

  it("seeds are exact", () => {
    expect(seedsOf("9223372036854775807", 2)).toEqual([2n ** 63n - 1n, 0n]);
    expect(seedsOf([1, 7n], 2).map(readableSeed)).toEqual([1, 7]);
    expect(readableSeed(2n ** 60n)).toBe(2n ** 60n);
    for (const seed of [-1, 2 ** 53, "x", 2n ** 63n, 1.5]) expect(() => seedsOf(seed, 1)).toThrow("give an integer from 0");
    expect(() => seedsOf([1], 2)).toThrow("1 seeds were given for 2 rows");
    expect(new Set(seedsOf(null, 50)).size).toBe(50);
  });
});

describe("a model's own settings", () => {
  const applied = (file: object, filters: string[] = [], logit_bias = false) =>
    appliedSettings(file as any, { interface: { vocab_size: 100, features: { filters, logit_bias } } } as any);
  const values = (file: object, options: object): Record<string, unknown> => resolve(applied(file).settings, options).values;

  it("are read in the words of other tools", () => {
    expect(values({ do_sample: true, top_k: -1 }, {})).toMatchObject({ temperature: 1, top_k: 0 });
    expect(values({ do_sample: true, temperature: 0, top_k: 5 }, {})).toMatchObject({ temperature: 0, top_k: 0 });
    expect(values({ do_sample: true, temperature: 0 }, { temperature: 0.5 })).toMatchObject({ temperature: 0.5, top_k: 50 });
    expect(values({ temperature: 0 }, {})).toMatchObject({ temperature: 0 });
  });

  it.each([
    { num_beams: 1, guidance_scale: null, temperature: 0, stop_strings: ["x"], eos_token_id: [0, 99], transformers_version: "5", bos_token_id: 1 },
    { do_sample: true, temperature: 0.5, top_p: 1, min_p: 0, max_length: 20, begin_suppress_tokens: null, repetition_penalty: 1.3, typical_p: 1 },
    { suppress_tokens: [], bad_words_ids: null, sequence_bias: [], min_new_tokens: 3, max_new_tokens: 3, mirostat: 0, mirostat_tau: 5 },
  ])("%o is followed", (file) => expect(applied(file)).toEqual({ settings: file, leftOut: null }));

  it.each([
    [{ num_beams: 4 }, '"num_beams", which qsample does not do'],
    [{ begin_suppress_tokens: [1], forced_eos_token_id: 0 }, '"begin_suppress_tokens", "forced_eos_token_id", which qsample does not do'],
    [{ sequence_bias: [[[7, 8], 1.5]] }, '"sequence_bias", which qsample does not do'],
    [{ suppress_tokens: [5] }, '"suppress_tokens", which the package was made without'],
    [{ typical_p: 0.5, bad_words_ids: [[5]], mirostat: 2 }, '"typical_p", "bad_words_ids", "mirostat", which the package was made without'],
    [{ top_p: 0, temperature: "hot" }, '"top_p": 0, "temperature": "hot", which is outside the accepted range'],
    [{ do_sample: "false", eos_token_id: 100 }, '"do_sample": "false", "eos_token_id": 100, which is outside'],
    [{ top_k: 2.5, eos_token_id: [1, 100], max_new_tokens: 0 }, '"top_k": 2.5, "eos_token_id": [1,100], "max_new_tokens": 0, which is outside'],
    [{ bad_words_ids: [[5], [6, 100]], dry_sequence_breakers: [5, 100] }, '"bad_words_ids": [[5],[6,100]], "dry_sequence_breakers": [5,100], which is outside'],
  ])("%o is named and left out", (file, sentence) => {
    const { settings, leftOut } = applied({ ...file, repetition_penalty: 1.3 });
    expect(settings).toEqual({ repetition_penalty: 1.3 });
    expect(leftOut).toBe(`the model's generation_config.json asks for ${leftOut!.slice(leftOut!.indexOf('"'))}`);
    expect(leftOut).toContain(sentence);
  });

  it("are followed if the package has what they need", () => {
    const file = { typical_p: 0.5, bad_words_ids: [[5]], mirostat: 2, suppress_tokens: [5], sequence_bias: [[[7], 1.5]] };
    expect(applied(file, ["typical_p", "bad_words_ids", "mirostat"], true)).toEqual({ settings: file, leftOut: null });
  });

  it("name each kind of reason in a sentence", () => {
    expect(applied({ top_k: -2, num_beams: 2, typical_p: 0.5 }).leftOut).toBe(
      'the model\'s generation_config.json asks for "typical_p", which the package was made without (export or bake the model again: the package ' +
      'then has what its settings need). It also asks for "num_beams", which qsample does not do (the tokens differ from transformers\'). ' +
      'It also asks for "top_k": -2, which is outside the accepted range (it is left out)');
  });

  it("lose tokens that no row can sample, and a least length above the longest", () => {
    expect(applied({ suppress_tokens: [5, 100, -1] }, [], true)).toEqual({ settings: { suppress_tokens: [5] }, leftOut: null });
    expect(applied({ min_new_tokens: 5, max_new_tokens: 4 })).toEqual({
      settings: { max_new_tokens: 4 }, leftOut: expect.stringContaining('"min_new_tokens": 5, which is outside'),
    });
  });
});

it("stop strings are found however the text is cut, first the one that ends first, of these the longest", () => {
  const text = "abcabdab\n\nx";
  for (const [stops, whole, match] of [
    [["abd"], "abc", "abd"], [["bd", "abd"], "abc", "abd"], [["cab", "bca"], "a", "bca"], [["\n\n", "zz"], "abcabdab", "\n\n"], [["q", "xx"], text, null],
  ] as const) {
    for (let size = 1; size <= text.length; size += 1) {
      const finder = new StopStrings(stops);
      let found = "";
      for (let start = 0; start < text.length; start += size) found += finder.put(text.slice(start, start + size));
      expect([found + finder.end(), finder.match]).toEqual([whole, match]);
    }
  }
});

it("hidden text may be of a stop string, and is never returned", () => {
  for (const [stop, pieces, whole, match] of [
    ["<eos>bc", ["a", "<eos>", "b"], "ab", null],
    ["<eos>bc", ["a", "<eos>", "b<e"], "ab<e", null],
    ["<eos>bc", ["a", "<eos>", "b", "c"], "a", "<eos>bc"],
    ["<eos>bc", ["<eos>", "a", "<eos>", "x"], "ax", null],
    ["s>c", ["a", "<eos>", "b", "s>c"], "ab", "s>c"],
    ["s>b", ["a", "<eos>", "b"], "a", "s>b"],
  ] as const) {
    const finder = new StopStrings([stop]);
    const found = pieces.map((piece) => finder.put(piece, { isHidden: piece === "<eos>" })).join("");
    expect([found + finder.end(), finder.match]).toEqual([whole, match]);
  }
});

it("a stop token and special tokens have no text, and stop strings may be special tokens", async () => {
  const file = new URL("../../qsample/assets/tiny_lm/tokenizer.json", import.meta.url);
  const tokenizer = new Tokenizer(JSON.parse(await readFile(file, "utf8")), {}, 2048, "a test");
  const special = [...Array(2048).keys()].find((id) => tokenizer.isSkipped(id) && !tokenizer.isSkipped(id, false))!;
  const name = tokenizer.decode([special], { skipSpecialTokens: false });
  const [a, b] = ["a", "b"].map((letter) => tokenizer.encode(letter, { addSpecialTokens: false })[0]);
  const textOf = (ids: readonly number[], stops: readonly string[], last = false): [string, boolean] => {
    const text = new GeneratedText(tokenizer, [], stops);
    ids.forEach((id, place) => text.put(id, { isStopToken: last && place === ids.length - 1 }));
    text.end();
    return [text.whole, text.stopped];
  };
  expect(textOf([a, b], [])).toEqual(["ab", false]);
  expect(textOf([a, b], [], true)).toEqual(["a", false]);
  expect(textOf([a, special, b], [])).toEqual(["ab", false]);
  expect(textOf([a, special, b], [name])).toEqual(["a", true]);
  expect(textOf([b, a, special, b], [`a${name}b`])).toEqual(["b", true]);
  expect(textOf([a, special, b], ["never"])).toEqual(["ab", false]);
});

it("a text that is cut off inside a character ends before it", async () => {
  const file = new URL("../../qsample/assets/tiny_lm/tokenizer.json", import.meta.url);
  const description = JSON.parse(await readFile(file, "utf8"));
  const tokenizer = new Tokenizer(description, {}, 2048, "a test");
  // The first bytes of characters differ in what may follow: E0, ED, F0 and F4 take a part of the other bytes alone.
  for (const character of ["é", "\u0800", "漢", "\ud7ff", "\u{10000}", "🙂", "\u{10ffff}"]) {
    for (const before of ["", "a", "é", "a\ufffd"]) {
      const whole = tokenizer.encode(before + character, { addSpecialTokens: false });
      const bytes = new TextEncoder().encode(character).length;
      for (let missing = 1; missing < bytes; missing += 1) {
        const ids = whole.slice(0, -missing);
        expect(tokenizer.decode(ids)).toBe(`${before}\ufffd`); // each byte of these characters has its own token
        const text = new GeneratedText(tokenizer, [], []);
        for (const id of ids) text.put(id);
        text.end();
        expect(text.whole).toBe(before);
      }
    }
  }
  const written = new GeneratedText(tokenizer, [], []);
  for (const id of tokenizer.encode("a\ufffd", { addSpecialTokens: false })) written.put(id);
  written.end();
  expect(written.whole).toBe("a\ufffd");
});

it("manifests of strangers are refused", () => {
  const file = { bytes: 1, sha256: "" };
  const good = { contract_version: "2.0", interface: { features: { sampler: true, filters: [] } }, token_ids: {}, files: {} };
  for (const contract_version of ["2.0", "2.4"]) parseManifest(JSON.stringify({ ...good, contract_version }), "here");
  for (const [change, message] of [
    [{ contract_version: "3.0" }, "follows decode contract \"3.0\""], [{ contract_version: "2.1" }, "without --num-speculative-tokens"], [{ contract_version: "2.2" }, "--text-only"], [{ contract_version: "2.3" }, "--kv-cache-dtype int8"], [{ contract_version: 2 }, "no contract_version"], [{ files: null }, "lacks files"],
    [{ files: { "../x": file } }, "outside of it"], [{ files: { "C:\\x": file } }, "outside of it"], [{ files: { x: null } }, "lists \"x\" without its bytes"], [{ interface: { features: { sampler: false } } }, "without its sampler"],
    [{ interface: { features: null } }, "lacks interface.features"], [{ interface: { features: { sampler: true } } }, "lacks interface.features.filters"],
    [{ interface: { features: { sampler: true, filters: ["min_p", "later"] } } }, 'has the filter "min_p"'],
    [{ compilation: "x" }, "compilation.execution_providers"],
    ...["nothing", "constructor", "__proto__", 5, null].map(
      (filter) => [{ interface: { features: { sampler: true, filters: [filter] } } }, "which this version of qsample does not know"] as const,
    ),
  ] as const) {
    expect(() => parseManifest(JSON.stringify({ ...good, ...change }), "here")).toThrow(PackageError);
    expect(() => parseManifest(JSON.stringify({ ...good, ...change }), "here")).toThrow(message);
  }
  expect(() => parseManifest("{", "here")).toThrow("is not JSON");
});

it("a package that takes grammars is refused for what else it has", () => {
  const features = { sampler: true, filters: [], grammars: true };
  const good = { contract_version: "2.4", interface: { features, key_values: [{ num_key_value_heads: 1, head_dim: 8 }], kv_cache_dtype: "int8" }, token_ids: {}, files: {} };
  expect(parseManifest(JSON.stringify(good), "here").interface.features.grammars).toBe(true);
  for (const [change, message] of [
    [{ image: { width: 8 } }, "--text-only"],
    [{ key_values: [{ num_key_value_heads: 1, head_dim: 8, capacity: 48 }] }, "--no-sliding-window-cache"],
    [{ kv_cache_dtype: "int4" }, "--kv-cache-dtype int8"],
    [{ features: { ...features, num_speculative_tokens: 3 } }, "without --num-speculative-tokens and --max-loras"],
    [{ features: { ...features, max_loras: 2 } }, "without --num-speculative-tokens and --max-loras"],
  ] as const) {
    expect(() => parseManifest(JSON.stringify({ ...good, interface: { ...good.interface, ...change } }), "here")).toThrow(PackageError);
    expect(() => parseManifest(JSON.stringify({ ...good, interface: { ...good.interface, ...change } }), "here")).toThrow(message);
  }
});

describe("grammars", () => {
  type Header = Record<string, any>;
  // Three tokens: an answer is token 1, then token 2 any number of times. Token 0 ends it.
  const SHAPES = { grammar_classes: [1, 3], grammar_transitions: [3, 3], grammar_distances: [3], grammar_maps: [3], grammar_late: [3], grammar_drafts: [3] };
  const NUMBERS: Record<string, number[]> = {
    grammar_classes: [0, 1, 2],
    grammar_transitions: [0, 0, 0, -1, 2, -1, -1, -1, 2],
    grammar_distances: [0, 2, 1],
    grammar_maps: [0, 0, 0],
    grammar_late: [0, 1, 2],
    grammar_drafts: [-1, 1, -1],
  };
  const file = (change: (header: Header, numbers: Record<string, number[]>) => void = () => undefined, rest: number[] = []): Uint8Array => {
    const numbers = structuredClone(NUMBERS);
    const header: Header = { __metadata__: { format: "qsample-grammar", version: "1", shortest: "2" } };
    let end = 0;
    for (const [name, shape] of Object.entries(SHAPES)) header[name] = { dtype: "I32", shape: [...shape], data_offsets: [end, (end += 4 * numbers[name].length)] };
    change(header, numbers);
    const text = new TextEncoder().encode(JSON.stringify(header));
    const data = new Uint8Array(Int32Array.from(Object.keys(SHAPES).flatMap((name) => numbers[name])).buffer);
    return Uint8Array.from([...new Uint8Array(BigUint64Array.of(BigInt(text.length)).buffer), ...text, ...data, ...rest]);
  };
  const set = (name: string, key: string, value: unknown) => (header: Header) => void (header[name][key] = value);
  const number = (name: string, place: number, value: number) => (_: Header, numbers: Record<string, number[]>) => void (numbers[name][place] = value);

  it("are read wherever their bytes lie, and keep when these change", () => {
    const bytes = file();
    const grammar = loadGrammar(bytes);
    expect(grammar).toMatchObject({ shortest: 2, hasThoughts: false, vocabSize: 3, numStates: 3, numClasses: 3 });
    const shifted = Uint8Array.from([9, 9, 9, ...bytes]);
    for (const same of [bytes.buffer as ArrayBuffer, Buffer.from(bytes), shifted.subarray(3)]) expect(loadGrammar(same)).toEqual(grammar);
    bytes.fill(1);
    expect([...grammar.tables.grammar_transitions]).toEqual(NUMBERS.grammar_transitions);
    expect(isGrammar(structuredClone(grammar))).toBe(true);
    expect(loadGrammar(file(number("grammar_late", 1, 2))).hasThoughts).toBe(true);
    // An answer that a limit may cut off.
    const open = (header: Header, numbers: Record<string, number[]>): void => {
      numbers.grammar_distances = [0, -1, 0];
      header.__metadata__.shortest = "-1";
    };
    expect(loadGrammar(file(open)).shortest).toBe(-1);
  });

  it.each<[string, unknown, string]>([
    ["no bytes", "choice.safetensors", 'bytes is "choice.safetensors"; give the content of a file'],
    ["null", null, "give the content of a file"],
    ["an empty file", new Uint8Array(), "has 0 bytes"],
    ["a length alone", new Uint8Array(8), "has a header that is not JSON"],
    ["a huge header", new Uint8Array(64).fill(255), "has a header of 18446744073709551615 bytes, and room for 56"],
    ["a text", new TextEncoder().encode("root ::= [0-9]+".padEnd(64)), "has a header of"],
    ["a header in no encoding", Uint8Array.from([1, 0, 0, 0, 0, 0, 0, 0, 255]), "has a header that is not JSON"],
    ["a header that is a list", Uint8Array.from([2, 0, 0, 0, 0, 0, 0, 0, 91, 93]), "has the header []"],
    ["a model", file((header) => void delete header.__metadata__), "is no file of the format qsample-grammar"],
    ["another format", file(set("__metadata__", "format", "pt")), "is no file of the format qsample-grammar"],
    ["another version", file(set("__metadata__", "version", "2")), 'has version "2" of its format'],
    ["another shortest answer", file(set("__metadata__", "shortest", "3")), 'says that its shortest answer has "3" tokens, and its tables 2'],
    ["a missing table", file((header) => void delete header.grammar_late), "lacks grammar_late"],
    ["another table", file((header) => void (header.more = header.grammar_late)), 'has the unknown table "more"'],
    ["a table of null", file((header) => void (header.grammar_late = null)), "has grammar_late of dtype undefined"],
    ["another dtype", file(set("grammar_late", "dtype", "I64")), 'has grammar_late of dtype "I64", which may be "I32"'],
    ["a shape that is none", file(set("grammar_late", "shape", 3)), "has grammar_late of shape 3"],
    ["a negative shape", file(set("grammar_late", "shape", [-3])), "has grammar_late of shape [-3]"],
    ["a broken shape", file(set("grammar_late", "shape", [1.5, 2])), "has grammar_late of shape [1.5,2]"],
    ["offsets that are none", file(set("grammar_late", "data_offsets", [0])), "has grammar_late at [0]"],
    ["negative offsets", file(set("grammar_late", "data_offsets", [-12, 0])), "has grammar_late at [-12,0]"],
    ["a size that is not the shape's", file(set("grammar_late", "shape", [4])), "has grammar_late of shape [4] in 12 bytes, which take 16"],
    ["a table behind the end", file(set("grammar_late", "data_offsets", [1000, 1012])), "is cut off: grammar_late ends at byte 1012 of 96"],
    ["a file cut off", file().slice(0, -4), "is cut off: grammar_drafts ends at byte 96 of 92"],
    ["more bytes", file(undefined, [0, 0, 0, 0]), "has 100 bytes of tables, and its header lists 96"],
    ["classes without a map", file(set("grammar_classes", "shape", [3])), "has grammar_classes of shape [3], which may be [1, V]"],
    ["two maps", file((header) => void Object.assign(header.grammar_classes, { shape: [3, 1] })), "has grammar_classes of shape [3,1], which may be [1, V]"],
    ["transitions in a line", file(set("grammar_transitions", "shape", [9])), "has grammar_transitions of shape [9]"],
    ["no state of its own", file(set("grammar_transitions", "shape", [1, 9])), "which may be [X, Y] with X from 2 on"],
    ["another number of states", file(set("grammar_transitions", "shape", [9, 1])), "has grammar_distances of shape [3] for 9 states"],
    ["a list that is a table", file(set("grammar_maps", "shape", [3, 1])), "has grammar_maps of shape [3,1] for 3 states"],
    ["a class that is none", file(number("grammar_classes", 2, 3)), "has 3 in grammar_classes, whose numbers are 0 to 2"],
    ["a negative class", file(number("grammar_classes", 0, -1)), "has -1 in grammar_classes"],
    ["a state that is none", file(number("grammar_transitions", 8, 3)), "has 3 in grammar_transitions, whose numbers are -1 to 2"],
    ["a state below none", file(number("grammar_transitions", 3, -2)), "has -2 in grammar_transitions"],
    ["a distance that is none", file(number("grammar_distances", 2, -2)), "has -2 in grammar_distances, whose numbers are -1 to 3"],
    ["a long distance", file(number("grammar_distances", 2, 4)), "has 4 in grammar_distances"],
    ["another map", file(number("grammar_maps", 1, 1)), "has 1 in grammar_maps, whose numbers are 0 to 0"],
    ["a late state that is none", file(number("grammar_late", 1, -1)), "has -1 in grammar_late, whose numbers are 0 to 2"],
    ["a guess that is no token", file(number("grammar_drafts", 1, 3)), "has 3 in grammar_drafts, whose numbers are -1 to 2"],
    ["a free state that leads on", file(number("grammar_transitions", 1, 2)), "has a state 0 that is not the state of rows without a grammar"],
    ["a free state that ends", file(number("grammar_distances", 0, 1)), "has a state 0 that is not"],
    ["a free state that is late", file(number("grammar_late", 0, 1)), "has a state 0 that is not"],
  ])("%s: is refused", (_, bytes, message) => {
    const load = (): unknown => loadGrammar(bytes as Uint8Array);
    expect(load).toThrow(ArgumentError);
    expect(load).toThrow(message);
    expect(load).toThrow("`qsample grammar`");
  });

  it("of several rows lie one below the other, each once", () => {
    class Tensor {
      constructor(readonly type: string, readonly data: Int32Array, readonly dims: number[]) {}
    }
    const manifest = { interface: { vocab_size: 3, features: { grammars: true } } } as any;
    const bind = (grammars: Parameters<typeof bindGrammars>[2]): any => bindGrammars({ Tensor } as any, manifest, grammars);
    const values = ({ tables }: any): object => Object.fromEntries(Object.entries<any>(tables).map(([name, { data, dims }]) => [name, [[...data], dims]]));

    const none = bind([null, null]);
    expect(none.startStates).toEqual([0, 0]);
    expect(values(none)).toEqual({
      grammar_classes: [[0, 0, 0], [1, 3]], grammar_transitions: [[0], [1, 1]], grammar_distances: [[0], [1]], grammar_maps: [[0], [1]], grammar_late: [[0], [1]],
    });

    const wide = loadGrammar(file());
    // A state, and a class: token 2 any number of times.
    const narrow = loadGrammar(file((header, numbers) => {
      Object.assign(numbers, {
        grammar_classes: [0, 0, 1], grammar_transitions: [0, 0, -1, 1], grammar_distances: [0, 1], grammar_maps: [0, 0], grammar_late: [0, 1], grammar_drafts: [-1, -1],
      });
      header.__metadata__.shortest = "1";
      let end = 0;
      for (const [name, shape] of Object.entries({ ...SHAPES, grammar_transitions: [2, 2] })) {
        header[name].shape = shape.length === 1 ? [2] : shape;
        header[name].data_offsets = [end, (end += 4 * numbers[name].length)];
      }
    }));
    const both = bind([wide, null, narrow, wide]);
    expect(both.startStates).toEqual([1, 0, 3, 1]);
    expect(values(both)).toEqual({
      grammar_classes: [[0, 1, 2, 0, 0, 1], [2, 3]],
      grammar_transitions: [[0, 0, 0, -1, 2, -1, -1, -1, 2, -1, 3, -1], [4, 3]],
      grammar_distances: [[0, 2, 1, 1], [4]],
      grammar_maps: [[0, 0, 0, 1], [4]],
      grammar_late: [[0, 1, 2, 3], [4]],
    });
    const without = { interface: { vocab_size: 3, features: {} } } as any;
    expect(bindGrammars({ Tensor } as any, without, [null])).toEqual({ tables: {}, startStates: [0] });
  });
});

describe("strangers", () => {
  const file = { bytes: 2, sha256: "" };
  const manifest = { contract_version: "2.0", interface: { features: { sampler: true, filters: [] } }, token_ids: {}, files: { "x.json": file } };

  it("have no folder that leads elsewhere, waits, or takes all memory", async () => {
    const folder = await mkdtemp(join(tmpdir(), "qsample-"));
    const open = () => openFolder(folder, { verify: false }, new Meter(undefined));
    try {
      await writeFile(join(folder, "qsample.json"), JSON.stringify(manifest));
      await writeFile(join(folder, "y.json"), "{}");
      await symlink("y.json", join(folder, "x.json"));
      expect(await (await open()).bytes("x.json")).toHaveLength(2);
      await rm(join(folder, "x.json"));
      await expect((await open()).bytes("x.json")).rejects.toThrow("lacks the file x.json");
      await symlink("/etc/hostname", join(folder, "x.json"));
      await expect((await open()).bytes("x.json")).rejects.toThrow("a link that leads out of the package");
      await rm(join(folder, "x.json"));
      execFileSync("mkfifo", [join(folder, "x.json")]);
      await expect((await open()).bytes("x.json")).rejects.toThrow("is no plain file");
      await truncate(join(folder, "qsample.json"), 1 << 30);
      await expect(open()).rejects.toThrow("has more than 8388608 bytes");
      await rm(join(folder, "qsample.json"));
      execFileSync("mkfifo", [join(folder, "qsample.json")]);
      await expect(open()).rejects.toThrow("is no plain file");
    } finally {
      await rm(folder, { recursive: true });
    }
  });

  it("have no address whose manifest takes all memory", async () => {
    const server = createServer((_, response) => {
      const piece = Buffer.alloc(1 << 20, " ");
      const more = () => void (response.destroyed || (response.write(piece) ? setImmediate(more) : response.once("drain", more)));
      more();
    });
    await new Promise<void>((resolve) => void server.listen(0, "127.0.0.1", resolve));
    try {
      const address = `http://127.0.0.1:${(server.address() as AddressInfo).port}/`;
      await expect(openUrl(address, {}, new Meter(undefined))).rejects.toThrow("has more than 8388608 bytes");
    } finally {
      server.closeAllConnections();
      server.close();
    }
  });

  it("have no template that asks for a hundred million numbers", async () => {
    const files = { where: "here", manifest: { files: {} }, bytes: () => Promise.reject(new Error()) } as any;
    const render = async (source: string): Promise<string> =>
      (await ChatTemplates.of(files, { chat_template: source })).render([{ role: "user", content: "x", range: 7 }], {});
    const parts = ["{% for i in range(3) %}{{ i }}{% endfor %}", "{{ range(7, 1, -2) | join(',') }}", "{{ messages[0].range }}"];
    expect(await render(parts.join(";"))).toBe("012;7,5,3;7");
    expect(await render("{{ range(100000) | length }}")).toBe("100000");
    for (const source of ["{{ range(100000001) }}", "{% set r = range %}{{ r(100001) }}", "{{ range(1, 2, 0) }}"]) {
      await expect(render(source)).rejects.toThrow(/refuses these messages: a range of (100000001|100001|Infinity) numbers/);
    }
  });
});

it("errors keep their kind on the way from a worker; lack of memory and of float16 is recognised", () => {
  const error = fromData(structuredClone(toData(new ArgumentError("no", "topK"))));
  expect(error).toBeInstanceOf(ArgumentError);
  expect(error).toMatchObject({ message: "no", param: "topK" });
  expect(fromData(toData(new DOMException("stop", "AbortError"))).name).toBe("AbortError");
  for (const cause of [new Error("std::bad_alloc"), new RangeError("Array buffer allocation failed"), new RangeError("Invalid typed array length: 9")]) {
    expect(translated(cause, "a step", "")).toBeInstanceOf(OutOfMemoryError);
  }
  expect(translated(new Error("Program Gather requires f16 but the device does not support it"), "a step", "")).toBeInstanceOf(DeviceError);
});
