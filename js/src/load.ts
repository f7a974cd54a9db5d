// What `load` takes, on every platform.
import { ArgumentError, checkObject, checkSignal, shown } from "./errors.js";
import type { FileOptions } from "./files.js";
import type { Device } from "./runtime.js";
import type { WebOptions } from "./web_runtime.js";

export interface LoadOptions extends FileOptions, WebOptions {
  /** "webgpu", "wasm", or in Node "cpu". Absent: in Node "cpu", or "wasm" without onnxruntime-node; in a browser "webgpu" if it is there, otherwise "wasm". */
  device?: Device;
  /** In a browser: compute in a worker, so that the page stays responsive; true, or a Worker that runs qsample-onnx/worker. */
  worker?: boolean | object;
}

const NAMES = ["device", "progress", "signal", "verify", "cache", "threads", "wasmPaths", "worker"];

/** Raise an error for a source that is no text, and an option that does not exist or has a wrong value. */
export function checkLoad(source: unknown, options: LoadOptions): void {
  if (!(source instanceof URL) && (typeof source !== "string" || !source)) {
    throw new ArgumentError(`source is ${shown(source)}; give the package's folder or address`, "source");
  }
  checkObject(options, "options");
  const unknown = Object.keys(options).find((name) => !NAMES.includes(name));
  if (unknown) throw new ArgumentError(`there is no option ${unknown}; the options are ${NAMES.join(", ")}`, unknown);
  const { signal, progress, threads } = options;
  checkSignal(signal);
  if (progress != null && typeof progress !== "function") throw new ArgumentError(`progress is ${shown(progress)}; give a function`, "progress");
  if (threads != null && !(Number.isInteger(threads) && threads >= 0)) {
    throw new ArgumentError(`threads is ${shown(threads)}; give an integer >= 1, or 0 for ONNX Runtime's choice`, "threads");
  }
}
