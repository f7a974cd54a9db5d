// The Python runtime's tokens and texts, in Node; and what a host has to refuse.
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import { load, type Model } from "../src/node.js";
import { given, optionsOf, optionsOfVector, vectors } from "./cases.js";

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

  it("reproduces the vectors, alone and in a batch", async () => {
    const model = models.bundled;
    const rows = vectors.rows as any[];
    for (const row of rows) expect(await model.encode(row.prompt)).toEqual(row.prompt_ids);
    for (const row of rows) {
      const { tokenIds } = await model.generate(row.prompt_ids, optionsOfVector(row)).output();
      expect(tokenIds[0]).toEqual(row.tokens);
    }
    const together = await model.generate(rows.map((row) => row.prompt_ids), { rows: rows.map(optionsOfVector) }).output();
    expect(together.tokenIds).toEqual(rows.map((row) => row.tokens));
  });
});
