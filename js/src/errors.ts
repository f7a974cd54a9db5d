// What can go wrong, by kind. The message says what was given, what is accepted and what to do.

/** Any error of this package. */
export class QsampleError extends Error {
  override name = "QsampleError";
}

/** The package is damaged, incomplete, of another version, or lacks what the call needs. */
export class PackageError extends QsampleError {
  override name = "PackageError";
}

/** The device is not there, cannot run the package, or was lost. */
export class DeviceError extends QsampleError {
  override name = "DeviceError";
}

/** The device or the browser has too little memory. */
export class OutOfMemoryError extends QsampleError {
  override name = "OutOfMemoryError";
}

/** An argument is wrong. `param` is its name. */
export class ArgumentError extends QsampleError {
  override name = "ArgumentError";

  constructor(message: string, readonly param?: string) {
    super(message);
  }
}

/** Raise an error if options are no object. */
export function checkObject(given: unknown, param: string): void {
  if (typeof given === "object" && given !== null && !Array.isArray(given)) return;
  throw new ArgumentError(`${param} is ${shown(given)}; give an object of options`, param);
}

/** Raise an error for a signal that is no AbortSignal. */
export function checkSignal(signal: unknown): void {
  if (signal == null || typeof (signal as AbortSignal).throwIfAborted === "function") return;
  throw new ArgumentError(`signal is ${shown(signal)}; give an AbortSignal`, "signal");
}

const KINDS = { QsampleError, PackageError, DeviceError, OutOfMemoryError, ArgumentError };

/** An error as plain data, for another thread. */
export interface ErrorData {
  name: string;
  message: string;
  param?: string;
}

export function toData(error: unknown): ErrorData {
  if (!(error instanceof Error)) return { name: "Error", message: String(error) };
  const param = error instanceof ArgumentError ? error.param : undefined;
  return { name: error.name, message: error.message, ...(param === undefined ? {} : { param }) };
}

export function fromData({ name, message, param }: ErrorData): Error {
  if (name === "AbortError" || name === "TimeoutError") return new DOMException(message, name);
  if (name === "ArgumentError") return new ArgumentError(message, param);
  const kind = KINDS[name as Exclude<keyof typeof KINDS, "ArgumentError">];
  return kind ? new kind(message) : Object.assign(new Error(message), { name });
}

/** A value as a message may show it. */
export function shown(value: unknown): string {
  let text: string | undefined;
  try {
    text = typeof value === "bigint" || typeof value === "number" ? String(value) : JSON.stringify(value);
  } catch {
    // A circular object: its kind has to do.
  }
  text ??= String(value);
  return text.length > 80 ? `${text.slice(0, 79)}…` : text;
}

const MEMORY = /bad_alloc|out of memory|out-of-memory|allocation failed|failed to allocate|could not allocate|invalid typed array length|invalid array length|cannot enlarge memory/i;

/** What an error of ONNX Runtime, WebGPU or the JavaScript engine means to the caller. */
export function translated(error: unknown, doing: string, remedy: string): unknown {
  if (error instanceof QsampleError || (error instanceof DOMException && error.name === "AbortError")) return error;
  const message = error instanceof Error ? error.message : String(error);
  if (MEMORY.test(message)) {
    return new OutOfMemoryError(
      `there is too little memory for ${doing} (${message.slice(0, 200)}); close other pages, give a smaller ` +
        "maxNewTokens or fewer prompts, or take a smaller or quantized package",
    );
  }
  if (/requires f16|shader-f16/.test(message)) {
    return new DeviceError(
      `${doing} needs float16, which this GPU lacks (${message.slice(0, 200)}); give device: "wasm", or compile the package for it: ` +
        "qsample compile --provider webgpu --dtype float32",
    );
  }
  return new QsampleError(`${doing} failed: ${message.slice(0, 500)}; ${remedy}`, { cause: error });
}
