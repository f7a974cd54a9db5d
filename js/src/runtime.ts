// ONNX Runtime: which build runs on which device, and a package's sessions.
import type { InferenceSession, Tensor } from "onnxruntime-web";
import { DeviceError, PackageError, translated } from "./errors.js";
import { type PackageFiles, entryOf } from "./files.js";
import type { Manifest } from "./manifest.js";
import { inTurn } from "./turns.js";
import { askForInt64 } from "./web_gpu_build.js";

export type Device = "webgpu" | "wasm" | "cpu";
/** A build of ONNX Runtime for JavaScript: onnxruntime-web or onnxruntime-node. */
export type Ort = typeof import("onnxruntime-web");

/** ONNX Runtime on a device. */
export interface Runtime {
  readonly ort: Ort;
  readonly device: Device;
  /** The GPU that holds the states; absent if they are in the host's memory. */
  readonly gpu?: GPUDevice;
  /** onnxruntime-node: opens files by their path, and writes an output where it is told to. */
  readonly native: boolean;
  /** Threads of an operator; undefined: ONNX Runtime's choice. */
  readonly threads?: number;
}

export const WEBGPU = "WebGpuExecutionProvider";
// What a package was compiled for, and where else its graph runs.
const COMPILED_FOR: Record<string, readonly Device[]> = {
  CPUExecutionProvider: ["cpu", "wasm"],
  [WEBGPU]: ["webgpu", "wasm", "cpu"],
};

/** The execution provider that a package was compiled for; undefined: a portable package. */
export const compiledFor = (manifest: Manifest): string | undefined => manifest.compilation?.execution_providers[0];

/** Raise an error if the package was compiled for another device. */
export function checkDevice(files: PackageFiles, device: Device): void {
  const provider = compiledFor(files.manifest);
  if (provider === undefined) return;
  const devices = COMPILED_FOR[provider] ?? [];
  if (!devices.includes(device)) {
    const runs = devices.length ? `runs on ${devices.join(" and ")}` : "runs on none of the devices here";
    throw new DeviceError(
      `device is "${device}", and the package ${files.where} was compiled for ${provider}: it ${runs}; ` +
        `give another device, or compile the portable package again (qsample compile --provider ${device === "webgpu" ? "webgpu" : "cpu"})`,
    );
  }
}

/** The options of WebGPU's provider that a package asks for. */
const settingsOf = (files: PackageFiles): Record<string, string> =>
  compiledFor(files.manifest) === WEBGPU ? files.manifest.compilation!.provider_options : {};

/** The nodes that are to run on the host. A manifest has spaces between their names. */
const forced = (files: PackageFiles, separator: string): { forceCpuNodeNames?: string } => {
  const { forceCpuNodeNames: names } = settingsOf(files);
  return names ? { forceCpuNodeNames: names.replaceAll(" ", separator) } : {};
};

function webGpu({ gpu, native }: Runtime, files: PackageFiles): InferenceSession.WebGpuExecutionProviderOption {
  const names = native ? undefined : forced(files, " ").forceCpuNodeNames?.split(" ");
  return { name: "webgpu", ...(gpu ? { device: gpu } : {}), ...(names ? { forceCpuNodeNames: names } : {}) };
}

/** The session of a graph, with its weights. `onHost`: on the processor, whatever the device. */
export async function openSession(
  runtime: Runtime, files: PackageFiles, name: string, { onHost = false } = {},
): Promise<InferenceSession> {
  const { ort, device } = runtime;
  const parts = partsOf(files, name);
  const host = runtime.native ? "cpu" : "wasm";
  const onGpu = !onHost && device === "webgpu";
  const options: InferenceSession.SessionOptions = {
    executionProviders: onGpu ? [webGpu(runtime, files)] : [host],
    // As the manifest asks; web_gpu_build.ts has the reason why that is not enough.
    ...(onGpu ? { extra: { ep: { [WEBGPU.toLowerCase()]: { ...settingsOf(files), ...forced(files, "\n") } } } } : {}),
    logSeverityLevel: 3,
    ...(runtime.threads === undefined || device !== "cpu" ? {} : { intraOpNumThreads: runtime.threads }),
  };
  entryOf(files.manifest, files.where, name);
  try {
    if (files.path && runtime.native) {
      for (const part of parts) await files.path(part);
      return await ort.InferenceSession.create(await files.path(name), options);
    }
    const externalData: { path: string; data: Uint8Array }[] = [];
    for (const part of parts) externalData.push({ path: part, data: await files.bytes(part) });
    const graph = await files.bytes(name);
    return await inTurn(() => {
      askForInt64(onGpu && settingsOf(files).enableInt64 === "1");
      return ort.InferenceSession.create(graph, { ...options, externalData });
    });
  } catch (error) {
    if (error instanceof Error && /No such file|cannot open|Failed to load external/i.test(error.message)) {
      throw new PackageError(`${name} of ${files.where} cannot be opened: ${error.message.slice(0, 300)}; copy the whole package`);
    }
    throw translated(error, `opening ${name} of ${files.where} on ${device}`, "give another device, or compile the package again");
  }
}

/** The files with the weights of a graph: decoder.onnx.data, decoder-2.onnx.data and so on. */
export function partsOf(files: PackageFiles, name: string): string[] {
  const stem = name.replace(/\.onnx$/, "");
  return Object.keys(files.manifest.files).filter((file) => /^(-\d+)?\.onnx\.data$/.test(file.slice(stem.length)) && file.startsWith(stem));
}

export type Tensors = Record<string, Tensor>;
