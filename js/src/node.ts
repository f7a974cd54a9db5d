// The package in Node: folders and addresses, onnxruntime-node or WebAssembly.
import { ArgumentError, DeviceError, shown } from "./errors.js";
import { Meter, openUrl } from "./files.js";
import { checkLoad, type LoadOptions } from "./load.js";
import { type Model, openModel } from "./model.js";
import { openFolder } from "./node_files.js";
import type { Ort, Runtime } from "./runtime.js";
import { openWasm } from "./web_runtime.js";

export * from "./common.js";
export type { LoadOptions };

/** Open a package: a folder, or an address that begins with http. */
export async function load(source: string | URL, options: LoadOptions = {}): Promise<Model> {
  checkLoad(source, options);
  if (options.worker) throw new ArgumentError("worker is for browsers; in Node, the processor's threads run beside JavaScript", "worker");
  const { device } = options;
  const meter = new Meter(options.progress);
  const files = /^https?:/.test(String(source)) ? await openUrl(source, options, meter) : await openFolder(source, options, meter);
  return openModel(files, await openRuntime(device, options), options, meter);
}

async function openRuntime(device: string | undefined, options: LoadOptions): Promise<Runtime> {
  if (device === "wasm") return openWasm(options, import("onnxruntime-web"));
  if (device !== undefined && device !== "cpu" && device !== "webgpu") {
    throw new ArgumentError(`device is ${shown(device)}; give "cpu", "wasm" or "webgpu"`, "device");
  }
  process.env.ORT_DISABLE_TELEMETRY ??= "1"; // ONNX Runtime's builds send events to Microsoft, and read this as they start
  try {
    const ort = ((await import("onnxruntime-node")) as unknown as { default: Ort }).default;
    return { ort, device: device ?? "cpu", native: true, threads: options.threads };
  } catch (error) {
    if (device === undefined) return openWasm(options, import("onnxruntime-web"));
    throw new DeviceError(
      `device is "${device}", which needs onnxruntime-node (${(error as Error).message.slice(0, 200)}); install it with ` +
        'ONNXRUNTIME_NODE_INSTALL=skip npm install onnxruntime-node, or give device: "wasm"');
  }
}
