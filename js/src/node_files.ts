// A package in a folder, for Node.
import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { readFile, realpath, stat } from "node:fs/promises";
import { join, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { PackageError } from "./errors.js";
import { damaged, entryOf, type FileOptions, Meter, type PackageFiles } from "./files.js";
import { LARGEST_MANIFEST, MANIFEST, parseManifest } from "./manifest.js";

export async function openFolder(folder: string | URL, options: FileOptions, meter: Meter): Promise<PackageFiles> {
  let where = String(folder);
  let text: string;
  try {
    if (/^file:/.test(where)) where = fileURLToPath(where);
    const found = await plain(where, MANIFEST);
    if (found.bytes > LARGEST_MANIFEST) throw damaged(where, MANIFEST, `has more than ${LARGEST_MANIFEST} bytes`);
    text = await readFile(found.file, "utf8");
  } catch (error) {
    if (error instanceof PackageError) throw error;
    const code = (error as NodeJS.ErrnoException).code;
    const found = code === "ENOENT" ? `has no ${MANIFEST}` : `cannot be read (${code})`;
    throw new PackageError(`${where} ${found}; give a folder that qsample export, bake or compile wrote, or an address`);
  }
  const manifest = parseManifest(text, where);

  async function path(name: string): Promise<string> {
    const entry = entryOf(manifest, where, name);
    const { file, bytes } = await plain(where, name).catch((error) => {
      throw error instanceof PackageError ? error : new PackageError(`${where} lacks the file ${name}; copy the whole folder`);
    });
    if (bytes !== entry.bytes) throw damaged(where, name, `has ${bytes} bytes instead of ${entry.bytes}`);
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

/** The real path and the size of a file of a package: no pipe or device, which would be waited for, and no link out of the
 * package, except into the Hugging Face hub's cache. */
async function plain(where: string, name: string): Promise<{ file: string; bytes: number }> {
  const [root, file] = await Promise.all([realpath(where), realpath(join(where, name))]);
  if (!file.startsWith(root + sep) && !/[\\/]models--[^\\/]*[\\/]blobs[\\/][^\\/]+$/.test(file)) {
    throw new PackageError(`${name} of ${where} is a link that leads out of the package; copy the file there if you trust it`);
  }
  const found = await stat(file);
  if (!found.isFile()) throw damaged(where, name, "is no plain file");
  return { file, bytes: found.size };
}
