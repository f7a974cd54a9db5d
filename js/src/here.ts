// A package in this thread of a browser.
import { ArgumentError, DeviceError, shown } from "./errors.js";
import { Meter, openUrl } from "./files.js";
import type { LoadOptions } from "./load.js";
import { type LocalModel, openModel } from "./model.js";
import { openWasm, openWebGpu, webGpuProblem } from "./web_runtime.js";

/** Open a package in this thread. */
export async function loadHere(source: string | URL, options: LoadOptions = {}): Promise<LocalModel> {
  const device = options.device ?? ((await webGpuProblem()) ? "wasm" : "webgpu");
  if (device === "cpu") throw new DeviceError('device is "cpu", which is for Node; browsers have "webgpu" and "wasm"');
  if (device !== "wasm" && device !== "webgpu") throw new ArgumentError(`device is ${shown(device)}; give "webgpu" or "wasm"`, "device");
  const meter = new Meter(options.progress);
  const files = await openUrl(source, options, meter);
  return openModel(files, await (device === "wasm" ? openWasm(options) : openWebGpu(options)), options, meter);
}
