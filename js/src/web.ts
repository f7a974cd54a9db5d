// The package in a browser: addresses; WebGPU or WebAssembly, in this thread or in a worker.
import { ArgumentError, DeviceError, shown } from "./errors.js";
import { Meter, openUrl } from "./files.js";
import { LOAD_OPTIONS, type LoadOptions } from "./load.js";
import { type Model, openModel } from "./model.js";
import { openWasm, openWebGpu, webGpuProblem } from "./web_runtime.js";

export * from "./common.js";
export { webGpuProblem };
export type { LoadOptions };

/** Open a package below an address. */
export async function load(source: string | URL, options: LoadOptions = {}): Promise<Model> {
  const unknown = Object.keys(options).find((name) => !LOAD_OPTIONS.includes(name));
  if (unknown) throw new ArgumentError(`there is no option ${unknown}; the options are ${LOAD_OPTIONS.join(", ")}`, unknown);
  const device = options.device ?? ((await webGpuProblem()) ? "wasm" : "webgpu");
  if (device === "cpu") throw new DeviceError('device is "cpu", which is for Node; browsers have "webgpu" and "wasm"');
  if (device !== "wasm" && device !== "webgpu") throw new ArgumentError(`device is ${shown(device)}; give "webgpu" or "wasm"`, "device");
  const meter = new Meter(options.progress);
  const files = await openUrl(source, options, meter);
  return openModel(files, await (device === "wasm" ? openWasm(options) : openWebGpu(options)), options, meter);
}
