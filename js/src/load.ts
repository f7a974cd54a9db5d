// What `load` takes, on every platform.
import { ArgumentError } from "./errors.js";
import type { FileOptions } from "./files.js";
import type { Device } from "./runtime.js";
import type { WebOptions } from "./web_runtime.js";

export interface LoadOptions extends FileOptions, WebOptions {
  /** "webgpu", "wasm", or in Node "cpu". Absent: in Node "cpu", or "wasm" without onnxruntime-node; in a browser "webgpu" if it is there, otherwise "wasm". */
  device?: Device;
  /** In a browser: compute in a worker, so that the page stays responsive; true, or a Worker that runs qsample/worker. */
  worker?: boolean | object;
}

const NAMES = ["device", "progress", "signal", "verify", "cache", "threads", "wasmPaths", "worker"];

/** Raise an error for an option that does not exist. */
export function checkLoadOptions(options: object): void {
  const unknown = Object.keys(options).find((name) => !NAMES.includes(name));
  if (unknown) throw new ArgumentError(`there is no option ${unknown}; the options are ${NAMES.join(", ")}`, unknown);
}
