// The public names, on every platform.
export type { ChatOptions, Message } from "./chat.js";
export { ArgumentError, DeviceError, OutOfMemoryError, PackageError, QsampleError } from "./errors.js";
export type { Progress } from "./files.js";
export type { AllowedTokensFn, Alternative, FinishReason, OutputName, Piece, Timing } from "./generate.js";
export { type Grammar, loadGrammar } from "./grammars.js";
export type { Manifest } from "./manifest.js";
export type { GenerateOptions, Generation, Model, Output, Prompt } from "./model.js";
export type { SamplingOptions, Seed } from "./options.js";
export type { AllowedTokens } from "./parameters.js";
export type { Device } from "./runtime.js";
export { NUMBERS as OPTIONS } from "./contract.js";
