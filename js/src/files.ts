// The files of a package, each checked against its sha256 in qsample.json before it is used.
import { ArgumentError, PackageError, QsampleError, shown, translated } from "./errors.js";
import { LARGEST_MANIFEST, MANIFEST, type Manifest, parseManifest } from "./manifest.js";

/** How far the files are. `loaded` and `total` are bytes of all files; `cached`: `file` was in the browser's cache. */
export interface Progress {
  file: string;
  loaded: number;
  total: number;
  cached: boolean;
}

export interface FileOptions {
  progress?: (progress: Progress) => void;
  signal?: AbortSignal;
  /** Compare each file's sha256 with the manifest. */
  verify?: boolean;
  /** Keep downloads in the browser's Cache API, and take them from there. */
  cache?: boolean;
}

/** A package, wherever it is. */
export interface PackageFiles {
  readonly where: string;
  readonly manifest: Manifest;
  /** The path of a file on this machine, checked; absent if the package is elsewhere. */
  path?(name: string): Promise<string>;
  bytes(name: string): Promise<Uint8Array<ArrayBuffer>>;
}

const CACHE = "qsample";
const decoder = new TextDecoder();

export const hasFile = (files: PackageFiles, name: string): boolean => name in files.manifest.files;

/** A file's text; undefined if the package has no such file. */
export async function readText(files: PackageFiles, name: string): Promise<string | undefined> {
  return hasFile(files, name) ? decoder.decode(await files.bytes(name)) : undefined;
}

/** A JSON file; undefined if the package has no such file. */
export async function readJson(files: PackageFiles, name: string): Promise<any> {
  const text = await readText(files, name);
  try {
    return text === undefined ? undefined : JSON.parse(text);
  } catch (error) {
    throw new PackageError(`${name} of ${files.where} is not JSON (${(error as Error).message}); export the package again`);
  }
}

/** The error for a file of another size or content. */
export function damaged(where: string, name: string, found: string): PackageError {
  return new PackageError(`${name} of ${where} ${found}: it is damaged or of another package; copy or download the package again`);
}

/** The entry of a file in the manifest. */
export function entryOf(manifest: Manifest, where: string, name: string): { bytes: number; sha256: string } {
  const entry = manifest.files[name];
  if (!entry) throw new PackageError(`${where} has no ${name}; export the package again`);
  return entry;
}

/** Counts the bytes of the files that are loaded, for `progress`. */
export class Meter {
  private readonly loaded = new Map<string, number>();
  private total = 0;

  constructor(private readonly report: FileOptions["progress"]) {}

  /** Files that will be loaded, so that the total is known from the start. */
  expect(manifest: Manifest, names: Iterable<string>): void {
    for (const name of names) {
      if (name in manifest.files && !this.loaded.has(name)) {
        this.loaded.set(name, 0);
        this.total += manifest.files[name].bytes;
      }
    }
  }

  at(file: string, bytes: number, cached: boolean): void {
    this.loaded.set(file, bytes);
    const loaded = [...this.loaded.values()].reduce((sum, some) => sum + some, 0);
    this.report?.({ file, loaded, total: Math.max(this.total, loaded), cached });
  }
}

/** An address, in a page relative to it. */
export function addressOf(source: string | URL): URL {
  try {
    return new URL(String(source), globalThis.location?.href);
  } catch {
    throw new ArgumentError(`source is ${shown(String(source))}, which is no address; give one such as https://example.org/model`, "source");
  }
}

/** A package below an address. Downloads are streamed, and kept in the browser's cache by their sha256. */
export async function openUrl(address: string | URL, options: FileOptions, meter: Meter): Promise<PackageFiles> {
  const base = addressOf(String(address).replace(/\/?$/, "/"));
  const where = base.href;
  const response = await get(new URL(MANIFEST, base), where, MANIFEST, options.signal, "no-cache");
  const manifest = parseManifest(decoder.decode(await read(response, where, MANIFEST, LARGEST_MANIFEST)), where);
  const cache = options.cache === false ? undefined : await openCache();

  async function bytes(name: string): Promise<Uint8Array<ArrayBuffer>> {
    const entry = entryOf(manifest, where, name);
    const url = new URL(name.split("/").map(encodeURIComponent).join("/"), base);
    const key = `${url.href}?sha256=${entry.sha256}`;
    const kept = await cache?.match(key).catch(() => undefined);
    if (kept) {
      const data = new Uint8Array(await kept.arrayBuffer());
      if (data.length === entry.bytes && (options.verify === false || (await sha256(data)) === entry.sha256)) {
        meter.at(name, data.length, true);
        return data;
      }
      await cache?.delete(key); // damaged where it was kept
    }
    const data = await download(await get(url, where, name, options.signal), where, name, entry.bytes, meter);
    if (options.verify !== false && (await sha256(data)) !== entry.sha256) {
      throw damaged(where, name, "has another sha256 than the manifest lists");
    }
    // A full disk, or a private window, is no reason not to run the model.
    await cache?.put(key, new Response(data)).catch(() => undefined);
    return data;
  }

  return { where, manifest, bytes };
}

async function openCache(): Promise<Cache | undefined> {
  return globalThis.caches?.open(CACHE).catch(() => undefined);
}

async function get(url: URL, where: string, name: string, signal?: AbortSignal, cache?: RequestCache): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, { signal, ...(cache ? { cache } : {}) });
  } catch (error) {
    if (signal?.aborted) throw signal.reason;
    throw new PackageError(`cannot download ${name} of ${where}: ${(error as Error).message}; check the address and the network`, {
      cause: error,
    });
  }
  if (!response.ok) {
    const hint = name === MANIFEST ? "give the folder that qsample export, bake or compile wrote" : "copy the whole package there";
    throw new PackageError(`the server answers ${response.status} for ${name} of ${where}; ${hint}`);
  }
  return response;
}

async function download(
  response: Response, where: string, name: string, size: number, meter: Meter,
): Promise<Uint8Array<ArrayBuffer>> {
  let data: Uint8Array<ArrayBuffer>;
  try {
    data = new Uint8Array(size);
  } catch (error) {
    throw translated(error, `loading ${name} (${size} bytes)`, "");
  }
  let loaded = 0;
  const reader = response.body!.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (loaded + value.length > size) throw damaged(where, name, `has more than the ${size} bytes that the manifest lists`);
      data.set(value, loaded);
      loaded += value.length;
      meter.at(name, loaded, false);
    }
  } catch (error) {
    await reader.cancel().catch(() => undefined);
    if (error instanceof QsampleError || (error as Error)?.name === "AbortError") throw error;
    throw new PackageError(`the download of ${name} of ${where} broke off after ${loaded} of ${size} bytes; try again`, { cause: error });
  }
  if (loaded < size) throw damaged(where, name, `has ${loaded} bytes instead of ${size}`);
  return data;
}

/** A body of at most `most` bytes. */
async function read(response: Response, where: string, name: string, most: number): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let size = 0;
  const reader = response.body!.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    size += value.length;
    if (size > most) {
      await reader.cancel().catch(() => undefined);
      throw damaged(where, name, `has more than ${most} bytes`);
    }
  }
  const whole = new Uint8Array(size);
  let start = 0;
  for (const piece of pieces) {
    whole.set(piece, start);
    start += piece.length;
  }
  return whole;
}

async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  if (!globalThis.crypto?.subtle) {
    throw new QsampleError(
      "browsers compute sha256 on secure pages only; serve the page over https or from localhost, or give verify: false",
    );
  }
  const digest = await crypto.subtle.digest("SHA-256", data);
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
