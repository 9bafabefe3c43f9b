// ---- the data

let data = null; // arrays of uint16: blocks and weights [head][k][position], cmt_weights [head][position], losses [token − 1]

async function unpack() {
  const packed = atob($("#data").textContent);
  $("#data").remove();
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = packed.charCodeAt(at);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const arrays = {};
  let start = 0;
  for (const [name, size] of Object.entries(page.sizes)) {
    const values = (arrays[name] = new Uint16Array(size));
    for (let at = 0; at < size; at++) values[at] = planes[start + at] | (planes[start + size + at] << 8);
    start += 2 * size;
  }
  return arrays;
}

const chosen = new Array(HEADS).fill(true);
const countChosen = () => chosen.filter(Boolean).length;

/**
 * What a token retrieves. share: of each head, the attention that its blocks get. dropped: of each head, the weight of
 * the context miss token if it retrieves nothing. blocks: those that a chosen head retrieves, the largest share first.
 */
function lookUp(position) {
  const share = new Float64Array(HEADS), dropped = new Float64Array(HEADS), blocks = new Map();
  for (let head = 0; head < HEADS; head++) {
    if (data.cmt_weights && data.blocks[head * k * length + position] === NO_BLOCK) dropped[head] = data.cmt_weights[head * length + position] / UNIT;
    for (let rank = 0; rank < k; rank++) {
      const at = (head * k + rank) * length + position, block = data.blocks[at];
      if (block === NO_BLOCK) continue;
      const weight = data.weights[at] / UNIT;
      share[head] += weight;
      if (!blocks.has(block)) blocks.set(block, { block, heads: new Float64Array(HEADS).fill(-1), share: 0 });
      const entry = blocks.get(block);
      entry.heads[head] = weight;
      if (chosen[head]) entry.share += weight / countChosen();
    }
  }
  const ordered = [...blocks.values()].filter((entry) => entry.heads.some((weight, head) => weight >= 0 && chosen[head]));
  return { share, dropped, blocks: ordered.sort((a, b) => b.share - a.share || b.block - a.block) };
}

/** The later tokens that retrieve a block, by a scan of all retrievals, which takes milliseconds. */
function findUsers(block) {
  const shares = new Float64Array(length), isUser = new Uint8Array(length), { blocks, weights } = data, unit = UNIT * countChosen();
  for (let head = 0; head < HEADS; head++) {
    if (!chosen[head]) continue;
    for (let rank = 0; rank < k; rank++) {
      const start = (head * k + rank) * length;
      for (let at = (block + 1) * W; at < length; at++)
        if (blocks[start + at] === block) (shares[at] += weights[start + at] / unit), (isUser[at] = 1);
    }
  }
  const positions = [];
  for (let at = 0; at < length; at++) if (isUser[at]) positions.push(at);
  positions.sort((a, b) => shares[b] - shares[a] || a - b);
  return { shares, positions, largest: positions.length ? shares[positions[0]] || 1 : 1 };
}
