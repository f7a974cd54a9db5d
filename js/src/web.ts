// The package in a browser: addresses; WebGPU or WebAssembly, in this thread or in a worker.
import { addressOf } from "./files.js";
import { loadHere } from "./here.js";
import { checkLoad, type LoadOptions } from "./load.js";
import type { Model } from "./model.js";
import { loadRemote } from "./remote.js";

export * from "./common.js";
export { webGpuProblem } from "./web_runtime.js";
export type { LoadOptions };

/** Open a package below an address. */
export async function load(source: string | URL, options: LoadOptions = {}): Promise<Model> {
  checkLoad(source, options);
  if (options.worker) return loadRemote(addressOf(source).href, options);
  return loadHere(source, options);
}
