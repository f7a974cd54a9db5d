// A file of `qsample grammar` → its tables, checked; the grammars of some rows → the tables that the graph walks.
import { GRAMMAR_TABLES } from "./contract.js";
import { ArgumentError, shown } from "./errors.js";
import type { Manifest } from "./manifest.js";
import type { Ort, Tensors } from "./runtime.js";

/** A form that answers follow, from `loadGrammar`: JSON of a schema, a text of a regular expression. It may be sent to a
 * worker. What is in it besides the documented fields may change. */
export interface Grammar {
  /** Tokens of the shortest answer, its stop token included; 0 or -1: a limit may cut answers off. */
  readonly shortest: number;
  /** Whether answers may begin with thoughts, which `thinkingTokenBudget` limits. */
  readonly hasThoughts: boolean;
  /** Tokens of the model that it is for. */
  readonly vocabSize: number;
  readonly kind: typeof FORMAT;
  readonly numStates: number;
  readonly numClasses: number;
  readonly tables: Readonly<Record<TableName, Int32Array>>;
}

const FORMAT = "qsample-grammar";
const VERSION = "1";
const MAX_FILE_BYTES = 1 << 26;
const MAX_HEADER_BYTES = 1 << 20;
const LENGTH_BYTES = 8; // of the header, in front of it
const START_STATE = 1;
const TABLES = [
  "grammar_classes", "grammar_transitions", "grammar_distances", "grammar_maps", "grammar_late", "grammar_drafts",
] as const;
type TableName = (typeof TABLES)[number];

/** A table of a file, with its shape. */
interface Table {
  shape: number[];
  numbers: Int32Array;
}

/** The grammar in a file that `qsample grammar` wrote for a package. bytes: the content of the file. */
export function loadGrammar(bytes: Uint8Array | ArrayBuffer): Grammar {
  const content = contentOf(bytes);
  const { header, dataStart } = readHeader(content);
  checkMetadata(header.__metadata__);
  checkNames(header);
  const data = content.subarray(dataStart);
  const tables = Object.fromEntries(TABLES.map((name) => [name, readTable(name, header[name], data)])) as Record<TableName, Table>;
  const used = Object.values(tables).reduce((sum, { numbers }) => sum + numbers.byteLength, 0);
  if (used !== data.length) throw damaged(`has ${data.length} bytes of tables, and its header lists ${used}`);
  checkShapes(tables);
  checkNumbers(tables);
  const [numStates, numClasses] = tables.grammar_transitions.shape;
  const { numbers: late } = tables.grammar_late;
  const shortest = tables.grammar_distances.numbers[START_STATE];
  if (header.__metadata__.shortest !== String(shortest)) {
    throw damaged(`says that its shortest answer has ${shown(header.__metadata__.shortest)} tokens, and its tables ${shortest}`);
  }
  return {
    kind: FORMAT,
    shortest,
    hasThoughts: late.some((state, place) => state !== place),
    vocabSize: tables.grammar_classes.numbers.length,
    numStates,
    numClasses,
    tables: Object.fromEntries(TABLES.map((name) => [name, tables[name].numbers])) as Record<TableName, Int32Array>,
  };
}

function damaged(found: string): ArgumentError {
  return new ArgumentError(`the grammar ${found}; make the file with \`qsample grammar\`, and copy all of it`, "bytes");
}

function contentOf(bytes: unknown): Uint8Array {
  let content: Uint8Array;
  if (bytes instanceof Uint8Array) content = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.length);
  else if (bytes instanceof ArrayBuffer) content = new Uint8Array(bytes);
  else throw new ArgumentError(`bytes is ${shown(bytes)}; give the content of a file that \`qsample grammar\` wrote, as a Uint8Array or an ArrayBuffer`, "bytes");
  if (content.length > MAX_FILE_BYTES) throw damaged(`has ${content.length} bytes, and may have ${MAX_FILE_BYTES}`);
  return content;
}

/** The header of a file of safetensors, and where the data after it begins. */
function readHeader(content: Uint8Array): { header: Record<string, any>; dataStart: number } {
  if (content.length < LENGTH_BYTES) throw damaged(`has ${content.length} bytes`);
  const length = new DataView(content.buffer, content.byteOffset).getBigUint64(0, true);
  const most = Math.min(content.length - LENGTH_BYTES, MAX_HEADER_BYTES);
  if (length > BigInt(most)) throw damaged(`has a header of ${length} bytes, and room for ${most}`);
  const dataStart = LENGTH_BYTES + Number(length);
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content.subarray(LENGTH_BYTES, dataStart)));
  } catch {
    throw damaged("has a header that is not JSON");
  }
  if (!isObject(header)) throw damaged(`has the header ${shown(header)}`);
  return { header, dataStart };
}

const isObject = (value: unknown): value is Record<string, any> => typeof value === "object" && value !== null && !Array.isArray(value);
const isSize = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;

function checkMetadata(metadata: unknown): void {
  if (!isObject(metadata) || metadata.format !== FORMAT) throw damaged(`is no file of the format ${FORMAT}`);
  if (metadata.version !== VERSION) throw damaged(`has version ${shown(metadata.version)} of its format, and this version of qsample reads ${VERSION}`);
}

function checkNames(header: Record<string, unknown>): void {
  const there = Object.keys(header).filter((name) => name !== "__metadata__");
  const missing = TABLES.find((name) => !there.includes(name));
  if (missing) throw damaged(`lacks ${missing}`);
  const unknown = there.find((name) => !TABLES.includes(name as TableName));
  if (unknown !== undefined) throw damaged(`has the unknown table ${shown(unknown)}`);
}

/** A copy of a table. entry: its description in the header. data: all tables. */
function readTable(name: string, entry: any, data: Uint8Array): Table {
  if (entry?.dtype !== "I32") throw damaged(`has ${name} of dtype ${shown(entry?.dtype)}, which may be "I32"`);
  const { shape, data_offsets: offsets } = entry;
  if (!Array.isArray(shape) || !shape.every(isSize)) throw damaged(`has ${name} of shape ${shown(shape)}`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isSize)) throw damaged(`has ${name} at ${shown(offsets)}`);
  const [begin, end] = offsets;
  const size = shape.reduce((product, length) => product * length, Int32Array.BYTES_PER_ELEMENT);
  if (end - begin !== size) throw damaged(`has ${name} of shape ${shown(shape)} in ${end - begin} bytes, which take ${size}`);
  if (end > data.length) throw damaged(`is cut off: ${name} ends at byte ${end} of ${data.length}`);
  // A copy, as the table may begin anywhere, and the caller may write to the bytes.
  return { shape, numbers: new Int32Array(data.slice(begin, end).buffer) };
}

function checkShapes(tables: Record<TableName, Table>): void {
  const { grammar_classes: classes, grammar_transitions: transitions } = tables;
  const [maps, vocabSize] = classes.shape;
  if (classes.shape.length !== 2 || maps !== 1 || vocabSize < 1) throw damaged(`has grammar_classes of shape ${shown(classes.shape)}, which may be [1, V]`);
  const [numStates, numClasses] = transitions.shape;
  if (transitions.shape.length !== 2 || numStates <= START_STATE || numClasses < 1) {
    throw damaged(`has grammar_transitions of shape ${shown(transitions.shape)}, which may be [X, Y] with X from ${START_STATE + 1} on`);
  }
  for (const name of ["grammar_distances", "grammar_maps", "grammar_late", "grammar_drafts"] as const) {
    const { shape } = tables[name];
    if (shape.length !== 1 || shape[0] !== numStates) throw damaged(`has ${name} of shape ${shown(shape)} for ${numStates} states`);
  }
}

/** Raise an error for a number that leads out of a table, and for a state 0 that is not that of rows without a grammar. */
function checkNumbers(tables: Record<TableName, Table>): void {
  const [numStates, numClasses] = tables.grammar_transitions.shape;
  const ranges: Record<TableName, [least: number, most: number]> = {
    grammar_classes: [0, numClasses - 1],
    grammar_transitions: [-1, numStates - 1],
    grammar_distances: [-1, numStates],
    grammar_maps: [0, 0],
    grammar_late: [0, numStates - 1],
    grammar_drafts: [-1, tables.grammar_classes.numbers.length - 1],
  };
  for (const name of TABLES) {
    const [least, most] = ranges[name];
    const wrong = tables[name].numbers.find((number) => number < least || number > most);
    if (wrong !== undefined) throw damaged(`has ${wrong} in ${name}, whose numbers are ${least} to ${most}`);
  }
  const free = [...tables.grammar_transitions.numbers.subarray(0, numClasses), tables.grammar_distances.numbers[0], tables.grammar_late.numbers[0]];
  if (free.some((number) => number !== 0)) throw damaged("has a state 0 that is not the state of rows without a grammar");
}

/** Whether a value is from `loadGrammar`, here or in another thread. */
export const isGrammar = (value: unknown): value is Grammar => isObject(value) && value.kind === FORMAT && isObject(value.tables);

/** Raise an error unless a package takes a grammar, and the grammar a budget of thoughts. */
export function checkGrammar(manifest: Manifest, grammar: Grammar | null, thinkingTokenBudget: number | null): void {
  const { features, vocab_size: vocabulary } = manifest.interface;
  if (grammar && !features.grammars) {
    throw new ArgumentError("grammar is given, and the package was exported without grammars; export the model again with --grammars, or --for-serving", "grammar");
  }
  if (grammar && grammar.vocabSize !== vocabulary) {
    throw new ArgumentError(`the grammar is for ${grammar.vocabSize} tokens, and the model has ${vocabulary}; make it for this package (qsample grammar --package)`, "grammar");
  }
  if (thinkingTokenBudget !== null && !grammar?.hasThoughts) {
    throw new ArgumentError(
      "thinkingTokenBudget is given, and the grammar does not know the thoughts of the model; make it with qsample grammar --thoughts, " +
        "or leave the budget out", "thinkingTokenBudget");
  }
}

/** Raise an error if no answer that follows the grammar fits a row. */
export function checkRoom(grammar: Grammar, promptLength: number, minLength: number, maxLength: number, numStopTokens: number): void {
  const { shortest } = grammar;
  const room = maxLength - promptLength;
  if (room < shortest) {
    throw new ArgumentError(
      `an answer may have ${room} tokens, and the shortest that follows the grammar has ${shortest}, its stop token included; ` +
        `allow at least ${shortest}`, "maxNewTokens");
  }
  if (minLength > promptLength) {
    throw new ArgumentError("minNewTokens or minLength is given with a grammar, which says itself where an answer may end; leave it out", "minNewTokens");
  }
  if (shortest && !numStopTokens) {
    throw new ArgumentError("a grammar is given and no stop token, with which its answers end; give eosTokenId", "eosTokenId");
  }
}

/** The tables for some rows, and the state in which the answer of each begins. */
export interface BoundGrammars {
  tables: Tensors;
  startStates: number[];
}

/** Lay the tables of the rows' grammars one below the other. grammars: of each row; null for any text. */
export function bindGrammars(ort: Ort, manifest: Manifest, grammars: readonly (Grammar | null)[]): BoundGrammars {
  if (!manifest.interface.features.grammars) return { tables: {}, startStates: grammars.map(() => 0) };
  const bound = [...new Set(grammars.filter((grammar) => grammar !== null))];
  const vocabulary = manifest.interface.vocab_size;
  const sizes: Record<string, number> = {
    X: bound.reduce((sum, { numStates }) => sum + numStates - START_STATE, START_STATE),
    Y: Math.max(1, ...bound.map(({ numClasses }) => numClasses)),
    Z: Math.max(1, bound.length),
    V: vocabulary,
  };
  const into: Record<string, Int32Array> = {};
  const tables: Tensors = {};
  for (const { name, axes, off } of GRAMMAR_TABLES) {
    const shape = axes.map((axis) => sizes[axis]);
    into[name] = new Int32Array(shape.reduce((product, size) => product * size, 1)).fill(off!);
    tables[name] = new ort.Tensor("int32", into[name], shape);
  }
  const startOf = new Map<Grammar | null, number>([[null, 0]]);
  let start = START_STATE;
  bound.forEach((grammar, map) => {
    startOf.set(grammar, start);
    writeGrammar(into, grammar, start, map, sizes.Y);
    start += grammar.numStates - START_STATE;
  });
  return { tables, startStates: grammars.map((grammar) => startOf.get(grammar)!) };
}

/** Write a grammar to the tables. start: the row of its first state. map: its row of grammar_classes. width: Y. */
function writeGrammar(into: Record<string, Int32Array>, grammar: Grammar, start: number, map: number, width: number): void {
  const { tables, numStates, numClasses, vocabSize } = grammar;
  const offset = start - START_STATE;
  // State 0 is the same for all grammars, and -1 is none.
  const moved = (state: number): number => (state >= START_STATE ? state + offset : state);
  into.grammar_classes.set(tables.grammar_classes, map * vocabSize);
  for (let state = START_STATE; state < numStates; state += 1) {
    const row = state + offset;
    const next = tables.grammar_transitions.subarray(state * numClasses, (state + 1) * numClasses);
    into.grammar_transitions.fill(-1, row * width, (row + 1) * width);
    into.grammar_transitions.set(next.map(moved), row * width);
    into.grammar_distances[row] = tables.grammar_distances[state];
    into.grammar_maps[row] = map;
    into.grammar_late[row] = moved(tables.grammar_late[state]);
  }
}
