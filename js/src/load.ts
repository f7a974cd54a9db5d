// What `load` takes, on every platform.
import type { FileOptions } from "./files.js";
import type { Device } from "./runtime.js";
import type { WebOptions } from "./web_runtime.js";

export interface LoadOptions extends FileOptions, WebOptions {
  /** "webgpu", "wasm", or in Node "cpu". Absent: in Node "cpu"; in a browser "webgpu" if it is there, otherwise "wasm". */
  device?: Device;
}
export const LOAD_OPTIONS = ["device", "progress", "signal", "verify", "cache", "threads", "wasmPaths", "worker"];
