// What the scripts of app/static find in a browser, for `tsc`, which alone reads this.

/** An element of a template, of whatever kind. No type can know that it is there: tests in a browser do. */
interface Found extends HTMLElement {
  action: string
  checked: boolean
  readonly children: HTMLCollectionOf<Found>
  close(): void
  content: string
  readonly dataset: Record<string, string>
  dateTime: string
  defaultChecked: boolean
  disabled: boolean
  elements: any
  readonly firstElementChild: Found
  hash: string
  href: string
  indeterminate: boolean
  readonly lastChild: ChildNode
  readonly lastElementChild: Found
  name: string
  onclose: () => void
  open: boolean
  options: HTMLOptionsCollection
  readonly parentElement: Found
  requestSubmit(): void
  selectedOptions: HTMLCollectionOf<HTMLOptionElement>
  selectionStart: number
  setSelectionRange(start: number, end: number): void
  showModal(): void
  type: string
  value: string
}
interface ParentNode {
  querySelector(selectors: string): Found
  querySelectorAll(selectors: string): NodeListOf<Found>
}
interface HTMLCollection {
  [Symbol.iterator](): ArrayIterator<Found>
}
interface Happening extends PointerEvent, KeyboardEvent, SubmitEvent {
  readonly target: Found
}
interface Document {
  addEventListener(type: string, listener: (event: Happening) => unknown, options?: AddEventListenerOptions): void
}
interface HTMLElement {
  addEventListener(type: string, listener: (event: Happening) => unknown, options?: AddEventListenerOptions): void
}
interface Element {
  closest(selectors: string): Found
}
/** There is a last one wherever we ask for it, as there is one at any index. */
interface Array<T> {
  at(index: number): T
}

/** What charts.js uses of Plotly, whose own types are thousands of lines. */
interface Found {
  data: any[]
  layout: any
  on(event: string, listener: (change: any) => void): void
}
interface Window {
  Plotly: {
    react(plot: HTMLElement, data: object[], layout: object, config?: object): Promise<unknown>
    downloadImage(figure: object, options: { format: 'png' | 'svg', scale: number, filename: string }): Promise<string>
  }
}
declare module 'plotly'
