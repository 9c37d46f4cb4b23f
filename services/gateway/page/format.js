// Numbers as they are shown. What is not known is a dash.

export const NONE = "–";

export const count = (value) => (value === null || value === undefined ? NONE : value.toLocaleString("en"));

export const percent = (share) => (share === null || share === undefined ? NONE : (share * 100).toFixed(0));

export const rate = (value) => (value < 100 ? value.toFixed(1) : count(Math.round(value)));

/** Milliseconds, with three digits where there are any. */
export const ms = (value) => (value < 10 ? value.toFixed(1) : count(Math.round(value)));

export const span = (value) => (value < 1000 ? `${ms(value)} ms` : `${(value / 1000).toFixed(value < 1e4 ? 2 : 1)} s`);

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
