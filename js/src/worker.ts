// A model in a worker: the page stays responsive while WebAssembly computes. The other end is remote.ts.
import { ArgumentError, toData } from "./errors.js";
import { loadHere } from "./here.js";
import type { GenerateOptions, Generation, LocalModel } from "./model.js";
import type { FromWorker, ToWorker } from "./remote.js";

const scope = globalThis as unknown as { postMessage(message: FromWorker): void; onmessage: ((event: { data: ToWorker }) => void) | null };
const aborts = new Map<number, AbortController>();
/** Questions to the page, for functions that live there. */
const asked = new Map<number, (answer: unknown) => void>();
let model: LocalModel | null = null;
let questions = 0;

const send = (message: FromWorker): void => scope.postMessage(message);

async function answer({ id, call, values }: Extract<ToWorker, { call: string }>, signal: AbortSignal): Promise<unknown> {
  if (call === "load") {
    const [source, options] = values as [string, object];
    model = await loadHere(source, { ...options, signal, progress: (progress) => send({ id, progress }) });
    const { device, manifest, generationConfig, hasChatTemplate } = model;
    return { device, manifest, generationConfig, hasChatTemplate };
  }
  if (!model) throw new ArgumentError("the worker has no model");
  if (call === "generate") {
    const [prompts, options, asks] = values as [string, GenerateOptions, boolean];
    // The function is the page's: it gets the row, and answers with the tokens.
    const allowedTokens = asks ? (row: unknown) => ask(id, row) : options.allowedTokens;
    const generation: Generation = model.generate(prompts, { ...options, ...(allowedTokens === undefined ? {} : { allowedTokens }), signal } as GenerateOptions);
    for await (const piece of generation) send({ id, piece });
    return generation.output();
  }
  return (model[call as "encode"] as (...values: unknown[]) => Promise<unknown>)(...values);
}

function ask(id: number, row: unknown): Promise<unknown> {
  const question = (questions += 1);
  send({ id, question, row });
  return new Promise((resolve) => asked.set(question, resolve));
}

scope.onmessage = ({ data }) => {
  if ("abort" in data) aborts.get(data.id)?.abort();
  else if ("question" in data) {
    asked.get(data.question)?.(data.answer);
    asked.delete(data.question);
  } else {
    const abort = new AbortController();
    aborts.set(data.id, abort);
    answer(data, abort.signal)
      .then((value) => send({ id: data.id, value }), (error: unknown) => send({ id: data.id, error: toData(error) }))
      .finally(() => aborts.delete(data.id));
  }
};
