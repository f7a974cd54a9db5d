// qsample.json as typed data: as much of it as a host needs, checked.
import { CONTRACT_VERSION, EXTRA_PARAMETERS, GRAMMARS_VERSION, REPLAY_VERSION } from "./contract.js";
import { PackageError, shown } from "./errors.js";

export interface Features {
  sampler: boolean;
  logit_bias: boolean;
  allowed_tokens: boolean;
  grammars?: boolean;
  logprobs: boolean;
  top_logprobs: number;
  logprobs_mode?: string;
  probs: boolean;
  filters: string[];
  filter_order: string;
}

export interface Manifest {
  contract_version: string;
  interface: {
    vocab_size: number;
    features: Features;
    captured: boolean;
  };
  token_ids: { pad: number; bos: number | null; eos: number[] };
  max_position_embeddings: number | null;
  compilation: {
    ctx_len: number;
    batch_size: number | null;
    execution_providers: string[];
    provider_options: Record<string, string>;
  } | null;
  files: Record<string, { bytes: number; sha256: string }>;
  source: { model_id: string };
}

export const MANIFEST = "qsample.json";
export const LARGEST_MANIFEST = 1 << 23; // bytes; a model of a hundred layers needs 50 kB
// Not 2.1, of packages with speculation or adapters, 2.2, of packages that read images, or 2.3, of packages with
// other caches: this host has none of these. Packages of 2.4 and 2.5 may have them besides.
const VERSIONS = [CONTRACT_VERSION, GRAMMARS_VERSION, REPLAY_VERSION];

/** The content of qsample.json. `where`: of the package, for messages. */
export function parseManifest(text: string, where: string): Manifest {
  let data: any;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new PackageError(`${MANIFEST} of ${where} is not JSON (${(error as Error).message}); export the package again`);
  }
  if (typeof data?.contract_version !== "string") {
    throw new PackageError(`${MANIFEST} of ${where} has no contract_version, so it is no package of qsample`);
  }
  const lacking = lackingPart(data);
  if (lacking) throw new PackageError(`the package ${where} ${lacking}`);
  if (!VERSIONS.includes(data.contract_version)) {
    throw new PackageError(
      `the package ${where} follows decode contract ${shown(data.contract_version)} and this version of qsample runs ` +
        `${VERSIONS.join(", ")}; install another version of one of them, or make the package again`,
    );
  }
  const missing = ["interface", "token_ids", "files"].filter((key) => typeof data[key] !== "object" || !data[key]);
  if (missing.length || typeof data.interface.features !== "object" || !data.interface.features) {
    throw new PackageError(`${MANIFEST} of ${where} lacks ${missing.join(", ") || "interface.features"}; export the package again`);
  }
  for (const [name, entry] of Object.entries<any>(data.files)) {
    if (!Number.isInteger(entry?.bytes) || entry.bytes < 0 || typeof entry.sha256 !== "string") {
      throw new PackageError(`${MANIFEST} of ${where} lists ${shown(name)} without its bytes or sha256; export the package again`);
    }
    if (!name || name.startsWith("/") || /[\\:]/.test(name) || name.split("/").some((part) => part === ".." || part === ".")) {
      throw new PackageError(`${MANIFEST} of ${where} lists the file ${shown(name)}, outside of it; do not use this package`);
    }
  }
  if (!data.interface.features.sampler) {
    throw new PackageError(
      `the package ${where} was exported without its sampler (include_sampler=False); export it with the sampler`,
    );
  }
  if (!Array.isArray(data.interface.features.filters) || (data.compilation != null && !Array.isArray(data.compilation.execution_providers))) {
    throw new PackageError(`${MANIFEST} of ${where} lacks interface.features.filters or compilation.execution_providers; export the package again`);
  }
  const unknown = data.interface.features.filters.find((name: unknown) => typeof name !== "string" || !Object.hasOwn(EXTRA_PARAMETERS, name));
  if (unknown !== undefined) {
    throw new PackageError(`the package ${where} has the filter ${shown(unknown)}, which this version of qsample does not know; install another version, or export the package again without it`);
  }
  return data as Manifest;
}

/** What a package has that this host lacks, and the remedy; undefined if there is nothing. data: a manifest that is not checked yet. */
function lackingPart(data: any): string | undefined {
  const { contract_version: version, interface: graph } = data;
  if (version === "2.2" || graph?.image) {
    return (
      "reads images, and this version of qsample runs packages that read text; export its language model alone " +
      "(qsample export --text-only), and compile that"
    );
  }
  if (graph?.captured && VERSIONS.includes(version) && version !== REPLAY_VERSION) {
    return `was compiled by an older qsample: its graph for replay follows decode contract ${version}; compile it again`;
  }
  const caches: unknown = graph?.key_values;
  const hasWindow = Array.isArray(caches) && caches.some((cache) => cache?.capacity != null);
  if (version === "2.3" || hasWindow || graph?.kv_cache_dtype === "int4") {
    return (
      "has caches of a window's size or of 4 bits, which this version of qsample does not run; compile it with " +
      "--no-sliding-window-cache, and with --kv-cache-dtype int8 or without"
    );
  }
  if (version === "2.1" || graph?.features?.num_speculative_tokens || graph?.features?.max_loras) {
    return (
      "draws several tokens a step or has LoRA adapters, which this version of qsample does not run; install another version, " +
      "or make the package again without --num-speculative-tokens and --max-loras"
    );
  }
  return undefined;
}
