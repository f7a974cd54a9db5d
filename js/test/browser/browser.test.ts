// The package in a Chromium: WebAssembly in a worker, WebGPU over SwiftShader, downloads, and what can go wrong.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from "vitest";
import { type Case, given, grammarBytes, optionsOfVector, vectors } from "../cases.js";
import { executable, Harness } from "./harness.js";

const rows = vectors.rows as any[];
const PROMPTS = rows.map((row) => row.prompt_ids);
const BATCH = { rows: rows.map(optionsOfVector) };
const TOKENS = rows.map((row) => row.tokens);
// Calls with grammars by their names, and the Python runtime's tokens; a page gets the files as lists of bytes.
const GRAMMAR_CASES = (given?.cases ?? []).filter((one) => one.package === "grammars" && !one.options.logitBias);
// A step over SwiftShader takes a fifth of a second, so WebGPU has two of them: different grammars in a batch, and thoughts.
const GPU_CASES = GRAMMAR_CASES.filter(({ options }) => options.rows || options.thinkingTokenBudget);
const tokensOf = (cases: readonly Case[]): number[][][] => cases.map(({ expected }) => expected.tokenIds);
const FILES = Object.fromEntries(Object.keys(given?.grammars ?? {}).map((name) => [name, [...grammarBytes(name)]]));

describe.skipIf(!given || !executable)("a package in a browser", () => {
  let harness: Harness;
  let page: Page;

  beforeAll(async () => {
    harness = await Harness.start(given!.packages);
  });
  afterAll(() => harness?.stop());
  beforeEach(async () => {
    page = await harness.page();
    harness.tamper = () => undefined;
    harness.requests = [];
  });
  afterEach(() => page.context().close());

  /** What `work` returns in the page, or its error's name and message. */
  const inPage = async (work: (qsample: any, values: any) => Promise<unknown>, values?: unknown): Promise<any> => {
    const source = `async (values) => {
      const options = { wasmPaths: location.origin + "/ort/", threads: 1 };
      try { return await (${work.toString()})({ ...qsample, load: (where, more) => qsample.load(where, { ...options, ...more }) }, values); }
      catch (error) { return { error: error.name, message: error.message }; }
    }`;
    return page.evaluate(`(${source})(${JSON.stringify(values ?? null)})`);
  };

  it("WebAssembly in a worker gives the vectors' tokens; files come once", async () => {
    const result = await inPage(async (qsample, { prompts, batch }) => {
      const seen: any[] = [];
      const model = await qsample.load("/bundled", { device: "wasm", worker: true, progress: (progress: any) => seen.push(progress) });
      const first = await model.generate(prompts, batch).output();
      const pieces: any[] = [];
      for await (const piece of model.generate("In the beginning", { maxNewTokens: 6, seed: 3 })) pieces.push(piece);
      const unknown = await model.generate("x", { top_k: 3 }).output().catch((error: any) => [error.name, error.param, error.message]);
      await model.dispose();
      const gone = await model.generate("x").output().catch((error: any) => error.message);
      await qsample.load("/bundled", { device: "wasm" });
      return { device: model.device, hasChatTemplate: model.hasChatTemplate, tokens: first.tokenIds, seen, pieces, unknown, gone };
    }, { prompts: PROMPTS, batch: BATCH });
    expect(result).toMatchObject({ device: "wasm", hasChatTemplate: true, tokens: TOKENS });
    expect(result.pieces.map(({ finishReason }: any) => finishReason)).toEqual([null, null, null, null, null, "length"]);
    expect(result.seen.at(-1).loaded).toBe(result.seen.at(-1).total);
    expect(result.unknown.slice(0, 2)).toEqual(["ArgumentError", "top_k"]);
    expect(result.unknown[2]).toContain("did you mean topK?");
    expect(result.gone).toContain("disposed");
    // The second time all but the manifest came from the browser's cache.
    expect(harness.requests.filter((name) => name === "decoder.onnx.data")).toHaveLength(1);
    expect(harness.requests.filter((name) => name === "qsample.json")).toHaveLength(2);
  });

  it("a signal ends a generation and a download, in a worker and without, and the model stays usable", async () => {
    const result = await inPage(async (qsample) => {
      const found: any[] = [];
      for (const worker of [true, false]) {
        const model = await qsample.load("/bundled", { device: "wasm", worker });
        const abort = new AbortController();
        let tokens = 0;
        try {
          for await (const _ of model.generate("In the beginning", { maxNewTokens: 400, eosTokenId: null, signal: abort.signal })) {
            if ((tokens += 1) === 3) abort.abort();
          }
        } catch (error: any) {
          found.push(error.name, tokens);
        }
        for await (const _ of model.generate("In the beginning", { maxNewTokens: 400, eosTokenId: null })) break;
        const { tokenIds } = await model.generate("In the", { maxNewTokens: 2, allowedTokens: null }).output().catch((error: any) => ({ tokenIds: error.message }));
        found.push(tokenIds.includes("--allowed-tokens"), (await model.generate("In the", { maxNewTokens: 2 }).output()).tokenIds[0].length);
      }
      await caches.delete("qsample");
      for (const worker of [true, false]) {
        const abort = new AbortController();
        const loading = qsample.load("/bundled", { device: "wasm", worker, signal: abort.signal, progress: () => abort.abort() });
        found.push(await loading.catch((error: any) => error.name));
      }
      return found;
    });
    expect(result).toEqual(["AbortError", 3, true, 2, "AbortError", 3, true, 2, "AbortError", "AbortError"]);
  });

  it("a function in the page guides a generation in a worker", async () => {
    const result = await inPage(async (qsample) => {
      const model = await qsample.load("/llama", { device: "wasm", worker: true });
      const allowedTokens = ({ tokens }: { tokens: number[] }): number[] => [40 + tokens.length];
      const { tokenIds } = await model.generate([[5, 6], [7]], { maxNewTokens: 4, allowedTokens }).output();
      const failed = await model.generate([5], { allowedTokens: () => { throw new RangeError("mine"); } }).output().catch((error: any) => error.message);
      return { tokenIds, failed };
    });
    expect(result).toEqual({ tokenIds: [[40, 41, 42, 43], [40, 41, 42, 43]], failed: "mine" });
  });

  /** The tokens of cases with grammars, on a device. */
  const grammarTokens = (cases: readonly Case[], source: string, device: string, worker: boolean): Promise<any> =>
    inPage(async (qsample, { source, device, worker, files, cases }) => {
      const grammars = Object.fromEntries(Object.entries<number[]>(files).map(([name, bytes]) => [name, qsample.loadGrammar(Uint8Array.from(bytes))]));
      const named = (options: any): any => (options.grammar ? { ...options, grammar: grammars[options.grammar] } : options);
      const model = await qsample.load(source, { device, worker });
      const tokens: any[] = [];
      for (const { prompts, options, seed } of cases) {
        const rows = options.rows ? { rows: options.rows.map(named) } : {};
        tokens.push((await model.generate(prompts, { ...named(options), ...rows, seed }).output()).tokenIds);
      }
      const refused = await model.generate("In", { grammar: grammars.person, maxNewTokens: 3 }).output().catch((error: any) => [error.name, error.param]);
      await model.dispose();
      return { device: model.device, tokens, refused };
    }, { source, device, worker, files: FILES, cases });

  it("grammars give the Python runtime's tokens: WebAssembly in a worker, WebGPU", async () => {
    const refused = ["ArgumentError", "maxNewTokens"];
    expect(await grammarTokens(GRAMMAR_CASES, "/grammars", "wasm", true)).toEqual({ device: "wasm", tokens: tokensOf(GRAMMAR_CASES), refused });
    expect(GPU_CASES).toHaveLength(2);
    expect(await grammarTokens(GPU_CASES, "/float32", "webgpu", false)).toEqual({ device: "webgpu", tokens: tokensOf(GPU_CASES), refused });
  });

  it("a damaged, cut or missing file is named, and the next try works", async () => {
    const load = async (qsample: any): Promise<string> => (await qsample.load("/bundled", { device: "wasm" })).device;
    const file = readFileSync(join(given!.packages.bundled, "decoder.onnx.data"));
    file[100] ^= 1;
    const only = (change: object) => (path: string) => (path.endsWith("decoder.onnx.data") ? change : undefined);
    for (const [tamper, message] of [
      [only({ body: new Uint8Array(file) }), "another sha256"],
      [only({ body: new Uint8Array(file.subarray(0, 5000)) }), "has 5000 bytes instead of"],
      [only({ cut: 60_000 }), "broke off"],
      [only({ status: 404 }), "answers 404 for decoder.onnx.data"],
      [(path: string) => (path.endsWith("qsample.json") ? { body: new TextEncoder().encode('{"contract_version": "9.0"}') } : undefined), "contract \"9.0\""],
    ] as const) {
      harness.tamper = tamper as any;
      expect(await inPage(load)).toMatchObject({ error: "PackageError", message: expect.stringContaining(message) });
    }
    harness.tamper = () => undefined;
    expect(await inPage(load)).toBe("wasm");
  });

  it("WebGPU gives the vectors' tokens", async () => {
    const result = await inPage(async (qsample, { prompts, batch }) => {
      const model = await qsample.load("/float32", { device: "webgpu" });
      return { device: model.device, ...(await model.generate(prompts, batch).output()) };
    }, { prompts: PROMPTS, batch: BATCH });
    expect(result).toMatchObject({ device: "webgpu", tokenIds: TOKENS });
  });

  // compile makes it where the plugin for WebGPU is.
  it.skipIf(!given?.packages.webgpu)("of a package for WebGPU, tokens alone come to the host", async () => {
    const result = await inPage(async (qsample, { prompts, batch }) => {
      const model = await qsample.load("/webgpu", { device: "webgpu" });
      const mapped: number[] = [];
      const { mapAsync } = GPUBuffer.prototype;
      GPUBuffer.prototype.mapAsync = function (...values) {
        mapped.push(this.size);
        return mapAsync.apply(this, values);
      };
      const { tokenIds, timing } = await model.generate(prompts, { ...batch, outputs: [] }).output();
      const found: any = {};
      for (const flushEvery of [1, 4, 7]) {
        const generation = model.generate(prompts, { ...batch, flushEvery });
        const pieces: any[] = [[], []];
        const before = mapped.length;
        for await (const { index, token, logprob, topLogprobs, probs } of generation) {
          pieces[index].push([token, logprob, topLogprobs, Math.max(...probs), probs.indexOf(Math.max(...probs))]);
        }
        found[flushEvery] = { pieces, mapped: mapped.splice(before), reads: (await generation.output()).timing.reads };
      }
      return { tokenIds, timing, mapped, found, vocabulary: model.manifest.interface.vocab_size };
    }, { prompts: PROMPTS.slice(0, 2), batch: { rows: BATCH.rows.slice(0, 2) } });
    expect(result).toMatchObject({ tokenIds: TOKENS.slice(0, 2) });
    expect(result.mapped).toHaveLength(result.timing.reads);
    // Status, length and up to four tokens of both rows.
    expect(Math.max(...result.mapped)).toBe(4 * 2 * 6);
    // With a log-probability, three alternatives and the probabilities of each, in the same read.
    for (const flushEvery of [4, 7]) {
      const { pieces, mapped, reads } = result.found[flushEvery];
      expect(pieces).toEqual(result.found[1].pieces);
      expect(mapped).toHaveLength(reads);
      expect(Math.max(...mapped)).toBe(4 * 2 * (2 + flushEvery * (2 + 6 + result.vocabulary)));
    }
  });

  it.skipIf(!given?.packages.webgpu)("of a package for WebGPU, grammars give the Python runtime's tokens, and these alone come to the host", async () => {
    expect((await grammarTokens(GPU_CASES, "/webgpu", "webgpu", false)).tokens).toEqual(tokensOf(GPU_CASES));
    const result = await inPage(async (qsample, files) => {
      const model = await qsample.load("/webgpu", { device: "webgpu" });
      const [person, choice] = [files.person, files.choice].map((bytes: number[]) => qsample.loadGrammar(Uint8Array.from(bytes)));
      const mapped: number[] = [];
      const made: number[] = [];
      const { mapAsync } = GPUBuffer.prototype;
      GPUBuffer.prototype.mapAsync = function (...values) {
        mapped.push(this.size);
        return mapAsync.apply(this, values);
      };
      const { createBuffer } = GPUDevice.prototype;
      GPUDevice.prototype.createBuffer = function (descriptor) {
        made.push(descriptor.size);
        return createBuffer.call(this, descriptor);
      };
      const rows = [{ grammar: person }, {}, { grammar: choice }];
      const { timing } = await model.generate(rows.map(() => "In the"), { rows, outputs: [], maxNewTokens: 24, seed: 5 }).output();
      const states = person.numStates + choice.numStates - 1;
      const bytes = 4 * states * Math.max(person.numClasses, choice.numClasses);
      const tables = made.filter((size) => size === Math.ceil(bytes / 16) * 16);
      return { timing, mapped, tables: tables.length };
    }, FILES);
    expect(result.mapped).toHaveLength(result.timing.reads);
    expect(result.timing.steps).toBeGreaterThan(12);
    // Status, length and up to four tokens of three rows.
    expect(Math.max(...result.mapped)).toBe(4 * 3 * 6);
    expect(result.tables).toBe(1);
  });

  it("a lost GPU is an error that says so, and another model can be loaded", async () => {
    const result = await inPage(async (qsample) => {
      const devices: GPUDevice[] = [];
      const { requestDevice } = GPUAdapter.prototype;
      GPUAdapter.prototype.requestDevice = async function (...values) {
        devices.push(await requestDevice.apply(this, values));
        return devices.at(-1)!;
      };
      const model = await qsample.load("/float32", { device: "webgpu" });
      let tokens = 0;
      const lost = await (async () => {
        for await (const _ of model.generate("In the beginning", { maxNewTokens: 30, flushEvery: 1 })) if ((tokens += 1) === 2) devices[0].destroy();
      })().catch((error) => [error.name, error.message]);
      await model.dispose();
      const again = await qsample.load("/float32", { device: "webgpu" });
      const { tokenIds } = await again.generate("In the beginning", { maxNewTokens: 2 }).output();
      return { lost, tokens: tokenIds[0].length };
    });
    expect(result.lost).toEqual(["DeviceError", expect.stringContaining("the GPU was lost")]);
    expect(result.tokens).toBe(2);
  });

  it("without WebGPU it says so, and the default is WebAssembly", async () => {
    const result = await inPage(async (qsample) => {
      Object.defineProperty(navigator, "gpu", { value: { requestAdapter: async () => null } });
      const none = await qsample.load("/bundled", { device: "webgpu" }).catch((error: any) => [error.name, error.message]);
      Object.defineProperty(Navigator.prototype, "gpu", { value: undefined });
      return { none, problem: await qsample.webGpuProblem(), device: (await qsample.load("/bundled")).device };
    });
    expect(result.none).toEqual(["DeviceError", expect.stringContaining("no adapter")]);
    expect(result.device).toBe("wasm");
  });
});
