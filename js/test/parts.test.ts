// What needs no package: options, stop strings, manifests.
import { describe, expect, it } from "vitest";
import { ArgumentError, DeviceError, fromData, OutOfMemoryError, PackageError, toData, translated } from "../src/errors.js";
import { parseManifest } from "../src/manifest.js";
import { checkNames, readableSeed, resolve, seedsOf } from "../src/options.js";
import { StopStrings } from "../src/text.js";

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
    [{ minNewTokens: 5, maxNewTokens: 4 }, "minNewTokens is 5, more than"],
    [{ eosTokenId: "x" }, "eosTokenId is \"x\"; give a token id"],
    [{ stop: [""] }, "stop is"],
    [{ logitBias: { 3: "much" } }, "logitBias of token 3"],
  ])("%o is refused", (options, message) => {
    expect(() => resolve({}, options as any)).toThrow(message);
    expect(() => resolve({}, options as any)).toThrow(ArgumentError);
  });

  it("names are checked, and what a model asks for in vain", () => {
    expect(() => checkNames({ top_p: 1 }, [])).toThrow("did you mean topP?");
    for (const name of ["constructor", "toString"]) expect(() => checkNames({ [name]: 1 }, [])).toThrow("the options are");
    for (const none of [null, 5, "ab", [1]]) expect(() => checkNames(none as any, [])).toThrow("give an object of options");
    expect(() => checkNames({ beams: 1 }, [])).toThrow("the options are");
    expect(() => resolve({ num_beams: 4 }, {})).toThrow("num_beams to 4");
    resolve({ num_beams: 1, guidance_scale: null }, {});
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

it("manifests of strangers are refused", () => {
  const file = { bytes: 1, sha256: "" };
  const good = { contract_version: "2.0", interface: { features: { sampler: true, filters: [] } }, token_ids: {}, files: {} };
  parseManifest(JSON.stringify(good), "here");
  for (const [change, message] of [
    [{ contract_version: "3.0" }, "follows decode contract \"3.0\""], [{ contract_version: 2 }, "no contract_version"], [{ files: null }, "lacks files"],
    [{ files: { "../x": file } }, "outside of it"], [{ files: { "C:\\x": file } }, "outside of it"], [{ files: { x: null } }, "lists \"x\" without its bytes"], [{ interface: { features: { sampler: false } } }, "without its sampler"],
    [{ interface: { features: null } }, "lacks interface.features"], [{ interface: { features: { sampler: true } } }, "lacks interface.features.filters"],
    [{ interface: { features: { sampler: true, filters: ["min_p", "later"] } } }, 'has the filter "min_p"'],
    [{ compilation: "x" }, "compilation.execution_providers"],
  ] as const) {
    expect(() => parseManifest(JSON.stringify({ ...good, ...change }), "here")).toThrow(PackageError);
    expect(() => parseManifest(JSON.stringify({ ...good, ...change }), "here")).toThrow(message);
  }
  expect(() => parseManifest("{", "here")).toThrow("is not JSON");
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
