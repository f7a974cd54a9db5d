// onnxruntime-web: WebAssembly, and WebGPU with the states on the GPU.
import { DeviceError, translated } from "./errors.js";
import type { Ort, Runtime } from "./runtime.js";
import { webGpuBuild } from "./web_gpu_build.js";

// Half-precision arithmetic and operations across a group of threads, which ONNX Runtime's kernels use if they are there.
const FEATURES = ["shader-f16", "subgroups"];

export interface WebOptions {
  /** Threads of WebAssembly; more than 1 needs a page with the headers COOP and COEP. */
  threads?: number;
  /** The folder of onnxruntime-web's .wasm files, if the bundler does not copy them next to the program. */
  wasmPaths?: string;
}

/** build: the module of ONNX Runtime; Node has its own. */
export async function openWasm(options: WebOptions, build?: Promise<unknown>): Promise<Runtime> {
  const ort = (await (build ?? import("onnxruntime-web/wasm"))) as Ort;
  configure(ort, options);
  return { ort, device: "wasm", native: false };
}

export async function openWebGpu(options: WebOptions): Promise<Runtime> {
  const adapter = await gpuAdapter();
  if (typeof adapter === "string") throw new DeviceError(`device is "webgpu", and ${adapter}; give device: "wasm"`);
  const ort = await webGpuBuild(options);
  try {
    // A device of this model's own, with all that the adapter has: if it is lost, another can be opened.
    const requiredLimits: Record<string, number> = {};
    for (const name in adapter.limits) {
      const limit = adapter.limits[name as keyof GPUSupportedLimits];
      if (typeof limit === "number") requiredLimits[name] = limit;
    }
    const requiredFeatures = FEATURES.filter((name) => adapter.features.has(name)) as GPUFeatureName[];
    const gpu = await adapter.requestDevice({ requiredFeatures, requiredLimits });
    return { ort, device: "webgpu", gpu, native: false };
  } catch (error) {
    throw translated(error, "starting WebGPU", 'give device: "wasm"');
  }
}

/** Why WebGPU cannot be used here; undefined if it can. */
export async function webGpuProblem(): Promise<string | undefined> {
  const adapter = await gpuAdapter();
  return typeof adapter === "string" ? adapter : undefined;
}

async function gpuAdapter(): Promise<GPUAdapter | string> {
  const gpu = (globalThis.navigator as Navigator | undefined)?.gpu;
  if (!gpu) {
    return globalThis.isSecureContext === false
      ? "browsers have WebGPU on secure pages only, over https or from localhost"
      : "this browser has no WebGPU";
  }
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" }).catch(() => null);
  return adapter ?? "this browser's WebGPU has no adapter: no GPU that it supports, or its use is switched off";
}

function configure(ort: Ort, { threads, wasmPaths }: WebOptions): void {
  if (threads !== undefined) ort.env.wasm.numThreads = threads;
  if (wasmPaths !== undefined) ort.env.wasm.wasmPaths = wasmPaths;
  ort.env.logLevel = "error";
}
