// A package in a folder, for Node.
import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { PackageError } from "./errors.js";
import { damaged, entryOf, type FileOptions, Meter, type PackageFiles } from "./files.js";
import { MANIFEST, parseManifest } from "./manifest.js";

export async function openFolder(folder: string | URL, options: FileOptions, meter: Meter): Promise<PackageFiles> {
  let where = String(folder);
  let text: string;
  try {
    if (/^file:/.test(where)) where = fileURLToPath(where);
    text = await readFile(join(where, MANIFEST), "utf8");
  } catch (error) {
    const code = (error as NodeJS.ErrnoException).code;
    const found = code === "ENOENT" ? `has no ${MANIFEST}` : `cannot be read (${code})`;
    throw new PackageError(`${where} ${found}; give a folder that qsample export, bake or compile wrote, or an address`);
  }
  const manifest = parseManifest(text, where);

  async function path(name: string): Promise<string> {
    const entry = entryOf(manifest, where, name);
    const file = join(where, name);
    const found = await stat(file).catch(() => undefined);
    if (!found) throw new PackageError(`${where} lacks the file ${name}; copy the whole folder`);
    if (found.size !== entry.bytes) throw damaged(where, name, `has ${found.size} bytes instead of ${entry.bytes}`);
    if (options.verify !== false) {
      const hash = createHash("sha256");
      let loaded = 0;
      for await (const chunk of createReadStream(file, { highWaterMark: 1 << 20, signal: options.signal })) {
        hash.update(chunk as Buffer);
        loaded += (chunk as Buffer).length;
        meter.at(name, loaded, false);
      }
      if (hash.digest("hex") !== entry.sha256) throw damaged(where, name, "has another sha256 than the manifest lists");
    }
    meter.at(name, entry.bytes, false);
    return file;
  }

  return { where, manifest, path, bytes: async (name) => new Uint8Array(await readFile(await path(name))) };
}
