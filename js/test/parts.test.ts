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
import { parseManifest } from "../src/manifest.js";
import { openFolder } from "../src/node_files.js";
import { checkNames, readableSeed, resolve, seedsOf } from "../src/options.js";
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
  parseManifest(JSON.stringify(good), "here");
  for (const [change, message] of [
    [{ contract_version: "3.0" }, "follows decode contract \"3.0\""], [{ contract_version: "2.2" }, "--text-only"], [{ contract_version: "2.3" }, "--kv-cache-dtype int8"], [{ contract_version: 2 }, "no contract_version"], [{ files: null }, "lacks files"],
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
