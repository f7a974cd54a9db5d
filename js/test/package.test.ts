// The Python runtime's tokens and texts, in Node; and what a host has to refuse.
import { createReadStream } from "node:fs";
import { cp, mkdtemp, readFile, rm, truncate, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { DeviceError, type Grammar, load, loadGrammar, type Model, PackageError } from "../src/node.js";
import { given, grammarBytes, optionsOf, optionsOfVector, vectors } from "./cases.js";

// Without them, run `pytest -m ci tests/js`, which makes them.
describe.skipIf(!given)("a package in Node", () => {
  const models: Record<string, Model> = {};

  beforeAll(async () => {
    for (const [name, folder] of Object.entries(given!.packages)) models[name] = await load(folder);
  });
  afterAll(async () => {
    for (const model of Object.values(models)) await model.dispose();
  });

  it.each(given?.cases.map((one, number) => [number, one] as const) ?? [])("case %i", async (_, one) => {
    const { logprobs, topIds, ...expected } = one.expected;
    const generation = models[one.package].generate(one.prompts, optionsOf(one));
    const found: number[][] = expected.tokenIds.map(() => []);
    const first: (number[] | undefined)[] = [];
    const texts = expected.tokenIds.map(() => "");
    for await (const piece of generation) {
      texts[piece.index] += piece.text;
      if (piece.logprob !== undefined) found[piece.index].push(piece.logprob);
      first[piece.index] ??= piece.topLogprobs?.map(({ token }) => token);
    }
    expect(texts).toEqual(expected.texts);
    expect(await generation.output()).toMatchObject(expected);
    if (logprobs) found.forEach((row, index) => row.forEach((value, place) => expect(value).toBeCloseTo(logprobs[index][place], 4)));
    if (topIds) expect(first).toEqual(topIds);
  });

  it("reproduces the vectors, alone and in a batch, also on WebAssembly", async () => {
    const model = models.bundled;
    const rows = vectors.rows as any[];
    for (const row of rows) expect(await model.encode(row.prompt)).toEqual(row.prompt_ids);
    for (const row of rows) {
      const { tokenIds } = await model.generate(row.prompt_ids, optionsOfVector(row)).output();
      expect(tokenIds[0]).toEqual(row.tokens);
    }
    const wasm = await load(given!.packages.bundled, { device: "wasm", threads: 1 });
    for (const one of [model, wasm]) {
      const together = await one.generate(rows.map((row) => row.prompt_ids), { rows: rows.map(optionsOfVector) }).output();
      expect(together.tokenIds).toEqual(rows.map((row) => row.tokens));
    }
    await wasm.dispose();
  });
});

describe.skipIf(!given)("grammars in Node", () => {
  const PERSON = /^\{"name": "[a-z ,;]*", "age": [1-9][0-9]*\}$/;
  let model: Model;
  const grammars: Record<string, Grammar> = {};

  beforeAll(async () => {
    model = await load(given!.packages.grammars);
    for (const name of Object.keys(given!.grammars)) grammars[name] = loadGrammar(grammarBytes(name));
  });
  afterAll(() => model.dispose());

  it("an answer is complete within every limit, from the shortest up, on both devices", async () => {
    const { person } = grammars;
    const wasm = await load(given!.packages.grammars, { device: "wasm", threads: 1 });
    for (const one of [model, wasm]) {
      const limits = Array.from({ length: 6 }, (_, more) => person.shortest + more);
      // Random rows, and a greedy one.
      const rows = [...limits.map((maxNewTokens) => ({ maxNewTokens, temperature: 1.5 })), { maxNewTokens: person.shortest, temperature: 0 }];
      const { texts, finishReasons, tokenIds } = await one.generate(rows.map(() => "And the"), { rows, grammar: person, seed: 7 }).output();
      for (const text of texts!) expect(text).toMatch(PERSON);
      for (const text of texts!) expect(typeof JSON.parse(text).age).toBe("number");
      expect(new Set(finishReasons)).toEqual(new Set(["stop"]));
      tokenIds.forEach((ids, index) => expect(ids.length).toBeLessThanOrEqual(rows[index].maxNewTokens));
    }
    await wasm.dispose();
  });

  it("a row's company, the groups of a call, late reads, and the way into another thread change no token", async () => {
    const cloned = structuredClone(grammars);
    const rows = ["person", null, "choice", "thoughts"].map((name) => ({ grammar: name === null ? null : grammars[name] }));
    const options = { temperature: 1, maxNewTokens: 25, seed: 11 };
    const prompts = rows.map(() => "In the");
    const { tokenIds, texts } = await model.generate(prompts, { ...options, rows }).output();
    expect(texts![2]).toMatch(/^(yes|no|maybe so)$/);
    for (const [index, row] of rows.entries()) {
      const alone = await model.generate(prompts[index], { ...options, ...row, seed: options.seed + index }).output();
      expect(alone.tokenIds[0]).toEqual(tokenIds[index]);
    }
    const names = ["person", null, "choice", "thoughts"] as const;
    const again = names.map((name) => ({ grammar: name === null ? null : cloned[name] }));
    expect((await model.generate(prompts, { ...options, rows: again, flushEvery: 4 }).output()).tokenIds).toEqual(tokenIds);
    // The grammar of the call holds for rows without an own one; null switches it off.
    const common = [{}, { grammar: null }, { grammar: grammars.choice }, { grammar: grammars.thoughts }];
    expect((await model.generate(prompts, { ...options, rows: common, grammar: grammars.person }).output()).tokenIds).toEqual(tokenIds);
  });

  it("a budget ends the thoughts", async () => {
    const ended = async (thinkingTokenBudget: number | null): Promise<number> => {
      const { tokenIds } = await model.generate("In the", { grammar: grammars.thoughts, thinkingTokenBudget, temperature: 1, maxNewTokens: 60, seed: 2 }).output();
      const [end] = await model.encode("#", { addSpecialTokens: false });
      return tokenIds[0].indexOf(end);
    };
    expect(await ended(null)).toBeGreaterThan(9);
    for (const budget of [0, 3, 9]) expect(await ended(budget)).toBe(budget);
  });

  it("what does not fit is refused", async () => {
    const { person, choice, thoughts } = grammars;
    for (const [options, param, message] of [
      [{ grammar: person, maxNewTokens: person.shortest - 1 }, "maxNewTokens", `an answer may have ${person.shortest - 1} tokens, and the shortest that follows the grammar has ${person.shortest}, its stop token included; allow at least ${person.shortest}`],
      [{ grammar: choice, minNewTokens: 1 }, "minNewTokens", "which says itself where an answer may end"],
      [{ grammar: choice, minLength: 50 }, "minNewTokens", "which says itself where an answer may end"],
      [{ grammar: choice, eosTokenId: null }, "eosTokenId", "no stop token"],
      [{ grammar: choice, thinkingTokenBudget: 5 }, "thinkingTokenBudget", "does not know the thoughts"],
      [{ thinkingTokenBudget: 5 }, "thinkingTokenBudget", "qsample grammar --thoughts"],
      [{ grammar: thoughts, thinkingTokenBudget: -1 }, "thinkingTokenBudget", "give an integer >= 0, or null"],
      [{ grammar: thoughts, thinkingTokenBudget: 1.5 }, "thinkingTokenBudget", "give an integer >= 0, or null"],
      [{ grammar: grammarBytes("choice") }, "grammar", "give a result of loadGrammar"],
      [{ grammar: [choice] }, "grammar", "give rows"],
      [{ rows: [{ grammar: "choice" }] }, "grammar", 'grammar is "choice"; give a result of loadGrammar'],
    ] as const) {
      const failed = await model.generate("In", options as any).output().catch((error) => error);
      expect(failed).toMatchObject({ name: "ArgumentError", param, message: expect.stringContaining(message) });
    }
    await expect(model.generate(["In", "So"], { rows: [{}, { grammar: person }], maxNewTokens: 5 }).output()).rejects.toThrow("prompt 1: an answer may have 5 tokens");
    await expect(model.generate(Array(500).fill(5), { grammar: person }).output()).rejects.toThrow("an answer may have 12 tokens");
    expect((await model.generate("In", { grammar: null, thinkingTokenBudget: null, maxNewTokens: 2 }).output()).tokenIds[0]).toHaveLength(2);
    const other = await load(given!.packages.llama);
    await expect(other.generate([5], { grammar: choice }).output()).rejects.toThrow(/the grammar is for 2048 tokens, and the model has \d+; make it for this package/);
    await other.dispose();
    const plain = await load(given!.packages.bundled);
    await expect(plain.generate("In", { grammar: choice }).output()).rejects.toThrow("was exported without grammars; export the model again with --grammars");
    await plain.dispose();
  });
});

describe.skipIf(!given)("what Node refuses", () => {
  const copied: string[] = [];
  const copy = async (change: (folder: string) => Promise<unknown>): Promise<string> => {
    const folder = await mkdtemp(join(tmpdir(), "qsample-js-"));
    copied.push(folder);
    await cp(given!.packages.bundled, folder, { recursive: true });
    await change(folder);
    return folder;
  };
  const manifest = (change: (manifest: any) => void) => async (folder: string) => {
    const data = JSON.parse(await readFile(join(folder, "qsample.json"), "utf8"));
    change(data);
    await writeFile(join(folder, "qsample.json"), JSON.stringify(data));
  };
  afterAll(() => Promise.all(copied.map((folder) => rm(folder, { recursive: true }))));

  it("damaged, cut and missing files; packages for other devices; wrong arguments of load", async () => {
    const data = "decoder.onnx.data";
    const flipped = await copy(async (folder) => {
      const bytes = await readFile(join(folder, data));
      bytes[1000] ^= 1;
      await writeFile(join(folder, data), bytes);
    });
    await expect(load(flipped)).rejects.toThrow(/decoder.onnx.data .* has another sha256/);
    await expect(load(await copy((folder) => truncate(join(folder, data), 99)))).rejects.toThrow("has 99 bytes instead of");
    await expect(load(await copy((folder) => rm(join(folder, data))))).rejects.toThrow("lacks the file decoder.onnx.data");
    await expect(load("/nowhere")).rejects.toThrow("has no qsample.json; give a folder");
    const compilation = { execution_providers: ["CUDAExecutionProvider"], ctx_len: 64, batch_size: null };
    await expect(load(await copy(manifest((one) => Object.assign(one, { compilation }))))).rejects.toThrow(DeviceError);
    await expect(load(given!.packages.bundled, { device: "gpu" as any })).rejects.toThrow('device is "gpu"');
    await expect(load(given!.packages.bundled, { devices: "cpu" } as any)).rejects.toThrow("there is no option devices");
    await expect(load(given!.packages.bundled, { signal: AbortSignal.abort() })).rejects.toThrow("aborted");
    for (const [options, message] of [
      [null, "options is null; give an object"], [{ signal: 5 }, "give an AbortSignal"], [{ progress: 5 }, "give a function"], [{ threads: -1 }, "threads is -1"],
    ] as [any, string][]) await expect(load(given!.packages.bundled, options)).rejects.toThrow(message);
    for (const source of [undefined, 5, "", {}]) await expect(load(source as any)).rejects.toThrow("give the package's folder or address");
    await expect(load("http://[x")).rejects.toThrow("is no address");
    for (const source of ["ftp://x/y", new URL("ftp://x/y")]) await expect(load(source)).rejects.toThrow(PackageError);
    await (await load(pathToFileURL(given!.packages.bundled).href)).dispose();
  });

  it("wrong calls, after which the model goes on; a package without a tokenizer", async () => {
    const model = await load(given!.packages.bundled);
    for (const [prompts, options, message] of [
      [[], {}, "no prompt was given"], [{}, {}, "prompts is {}"], [[5000], {}, "token id 5000"], [["x", 3], {}, "prompt 1 is 3"],
      ["x", { allowedTokens: [1] }, "--allowed-tokens"], ["x", { logitBias: { 1: 1 } }, "--logit-bias"], ["x", { xtcProbability: 0.5 }, "--filter xtc"],
      ["x", { eosTokenId: 99999 }, "token id 99999"], [Array(600).fill(5), {}, "the context length is 512"], ["x", { maxLength: 1 }, "raise maxLength"],
      [[{ role: "user" }], {}, "has no content"], [["a", "b"], { rows: [{}] }, "each of the 2 prompts"], ["x\ud800", {}, "lone surrogate"],
      ["x", null, "options is null"], ["x", { signal: 5 }, "give an AbortSignal"], ["x", { rows: [null] }, "rows[0] is null"], [[, 5], {}, "token id undefined"],
      ...([["tools", 5], ["documents", 5], ["chatTemplate", 5], ["addGenerationPrompt", "no"], ["chatTemplateKwargs", 5]] as const).map(
        ([name, value]) => [[{ role: "user", content: "x" }], { [name]: value }, `${name} is ${JSON.stringify(value)}; give`]),
      [[{ role: "user", content: "x" }], { chatTemplate: "constructor" }, "neither Jinja nor a template"],
    ] as [any, any, string][]) {
      await expect(model.generate(prompts, options).output()).rejects.toThrow(message);
    }
    for (const text of [5, null]) await expect(model.encode(text as any)).rejects.toThrow("give a text");
    for (const ids of [5, "ab", ["a"]]) await expect(model.decode(ids as any)).rejects.toThrow("give a list of token ids");
    const endless = { maxNewTokens: 300, eosTokenId: null };
    await expect(model.generate("x", { ...endless, signal: AbortSignal.timeout(20) }).output()).rejects.toThrow("timeout");
    for await (const _ of model.generate("x", endless)) break;
    expect((await model.generate("", { maxNewTokens: 2 }).output()).promptLengths).toEqual([1]);
    const cut = model.generate("x", endless)[Symbol.asyncIterator]();
    await cut.next();
    await model.dispose();
    await expect(cut.next()).rejects.toThrow("the model was disposed of");
    await expect(model.generate("x").output()).rejects.toThrow("disposed");

    const mute = await load(await copy(manifest((one) => delete one.files["tokenizer.json"])));
    await expect(mute.generate("x").output()).rejects.toThrow("no tokenizer.json");
    expect(await mute.generate([5, 6], { maxNewTokens: 2, seed: 1 }).output()).toMatchObject({ texts: null, seeds: [1] });
    await mute.dispose();
  });

  it("guides each token by a function, and by a mask", async () => {
    const model = await load(given!.packages.llama);
    const { tokenIds } = await model.generate([[5, 6], [7]], { maxNewTokens: 3, allowedTokens: async ({ index, tokens }) => [40 + 10 * index + tokens.length] }).output();
    expect(tokenIds).toEqual([[40, 41, 42], [50, 51, 52]]);
    expect((await model.generate([5], { maxNewTokens: 3, temperature: 2, allowedTokens: [33, 64] }).output()).tokenIds[0].every((id) => id === 33 || id === 64)).toBe(true);
    await model.dispose();
  });

  it("the outputs of late reads are those of each step, also beside a function; and only those that were asked for come", async () => {
    const model = await load(given!.packages.llama);
    const pieces = async (options: object): Promise<any[]> => {
      const found: any[] = [[], []];
      for await (const piece of model.generate([[5, 6], [7]], { rows: [{ maxNewTokens: 9 }, { maxNewTokens: 14 }], eosTokenId: null, seed: 3, ...options })) {
        found[piece.index].push(piece);
      }
      return found;
    };
    const early = await pieces({ flushEvery: 1 });
    expect(early.map((row) => row.length)).toEqual([9, 14]);
    expect(early[0].every(({ logprob, topLogprobs }: any) => Number.isFinite(logprob) && topLogprobs.length === 3)).toBe(true);
    const allTokens = Array.from({ length: model.manifest.interface.vocab_size }, (_, token) => token);
    for (const flushEvery of [4, 7]) {
      expect(await pieces({ flushEvery })).toEqual(early);
      expect(await pieces({ flushEvery, allowedTokens: () => allTokens })).toEqual(early);
    }
    const [[first]] = await pieces({ flushEvery: 4, outputs: ["logprob"] });
    expect([first.logprob, first.topLogprobs]).toEqual([early[0][0].logprob, undefined]);
    await expect(model.generate([5], { outputs: ["logprobs"] as any }).output()).rejects.toThrow('give a list of logprob, topLogprobs, probs');
    await model.dispose();
  });

  it("loads an address", async () => {
    const server = createServer((request, response) => createReadStream(join(given!.packages.bundled, request.url!)).on("error", () => response.writeHead(404).end()).pipe(response));
    await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
    const model = await load(`http://127.0.0.1:${(server.address() as any).port}`);
    const [row] = vectors.rows;
    expect((await model.generate(row.prompt_ids, optionsOfVector(row)).output()).tokenIds).toEqual([row.tokens]);
    await model.dispose();
    server.close();
  });
});
