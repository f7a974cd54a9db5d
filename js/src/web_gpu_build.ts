// onnxruntime-web's build for WebGPU, with an option of its provider that its JavaScript cannot set.
//
// Packages for WebGPU ask for `enableInt64`. Without it, their arithmetic on ids runs on the host: some 25 copies a step, each a
// wait for the GPU. The provider reads it when it is appended to a session's options; onnxruntime-web (1.30) sets what
// callers give in `extra` later. So the function that appends it is replaced when the WebAssembly module gets it.
import type { Ort } from "./runtime.js";
import type { WebOptions } from "./web_runtime.js";

type Append = (options: number, name: number, keys: number, values: number, count: number) => unknown;

/** What is used of the WebAssembly module. */
interface Module {
  _malloc(bytes: number): number;
  _free(address: number): void;
  getValue(address: number, type: string): number;
  setValue(address: number, value: number, type: string): void;
  lengthBytesUTF8(text: string): number;
  stringToUTF8(text: string, address: number, bytes: number): void;
}

const NAME = "_OrtAppendExecutionProvider";
let opened: Promise<Ort> | null = null;
/** Whether the session that is being created asks for it; one is created at a time. */
let asked = false;

export const askForInt64 = (ask: boolean): void => { asked = ask; };

export function webGpuBuild({ wasmPaths }: WebOptions): Promise<Ort> {
  opened ??= open(wasmPaths);
  return opened;
}

async function open(wasmPaths: string | undefined): Promise<Ort> {
  const ort = (await import("onnxruntime-web/webgpu")) as unknown as Ort;
  ort.env.wasm.numThreads = 1; // the host computes shapes only
  ort.env.logLevel = "error";
  if (wasmPaths !== undefined) ort.env.wasm.wasmPaths = wasmPaths;
  // The module is a plain object that nobody sees before it is in use; its first assignment of the name comes here.
  Object.defineProperty(Object.prototype, NAME, {
    configurable: true,
    set(this: Module, append: Append) {
      delete (Object.prototype as Record<string, unknown>)[NAME];
      const value = (...given: Parameters<Append>): Promise<unknown> => withInt64(this, append, given);
      Object.defineProperty(this, NAME, { configurable: true, enumerable: true, writable: true, value });
    },
  });
  return ort;
}

/** Append the provider with one more option. */
async function withInt64(module: Module, append: Append, [options, name, keys, values, count]: Parameters<Append>): Promise<unknown> {
  if (!asked) return append(options, name, keys, values, count);
  const text = (value: string): number => {
    const bytes = module.lengthBytesUTF8(value) + 1;
    const address = module._malloc(bytes);
    module.stringToUTF8(value, address, bytes);
    return address;
  };
  const longer = (list: number, address: number): number => {
    const copy = module._malloc(4 * (count + 1));
    for (let i = 0; i < count; i += 1) module.setValue(copy + 4 * i, module.getValue(list + 4 * i, "*"), "*");
    module.setValue(copy + 4 * count, address, "*");
    return copy;
  };
  const made = [text("enableInt64"), text("1")];
  made.push(longer(keys, made[0]), longer(values, made[1]));
  try {
    return await append(options, name, made[2], made[3], count + 1);
  } finally {
    for (const address of made) module._free(address);
  }
}
